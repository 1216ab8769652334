"""Models whose heads read the depth by kernels: what they say and learn, against the same by PyTorch."""

import itertools

import pytest
import torch
from models.memory_models import depth_model
from ops.laws import assert_close
from ops.table import DEVICE
from pairs import by_default

from midus_hf.ops import op_choices
from midus_hf.ops.moda.op import depth_attention


def logits_and_gradients(model, tokens, backend):
    with op_choices(backend=backend):
        made = model(tokens, use_cache=False).logits
        model.zero_grad(set_to_none=True)
        made.square().mean().backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {"logits": made.detach()} | gradients


@pytest.mark.parametrize(
    "kind, checkpointed",
    by_default([("reused", True)], itertools.product(["default", "reused", "joint"], [False, True])),
)
def test_models_by_kernels_equal_models_by_pytorch(kind, checkpointed, monkeypatch):
    model = depth_model(kind=kind, dtype=torch.float32).to(DEVICE)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    tokens = torch.arange(8, device=DEVICE).view(2, 4)
    expected = logits_and_gradients(model, tokens, "torch")
    calls, op = [], depth_attention.__globals__["depth_attention_op"]

    def spied(*arguments):
        calls.append(len(arguments[1]))
        return op(*arguments)

    monkeypatch.setitem(depth_attention.__globals__, "depth_attention_op", spied)
    actual = logits_and_gradients(model, tokens, "triton")
    others = range(1, model.config.num_hidden_layers)
    assert calls[: len(others)] == [calls[0] * layers for layers in others]
    assert any("ffn_key" in name for name in expected) and expected.keys() == actual.keys()
    for name, exact in expected.items():
        assert_close(name, actual[name], exact, torch.float32, slack=4)  # both are float32, of several layers
