"""Models whose heads read the depth by kernels: what they say and learn, against the same by PyTorch."""

import itertools

import pytest
import torch
from models.depth_models import depth_model
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE
from pairs import by_default

from midus_hf.ops import op_choices
from midus_hf.ops.depth.op import depth_attention


def logits_and_gradients(model, tokens, backend):
    with op_choices(backend=backend):
        made = model(tokens, use_cache=False).logits
        model.zero_grad(set_to_none=True)
        made.square().mean().backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {"logits": made.detach()} | gradients


@pytest.mark.parametrize(
    "kind, checkpointed",
    by_default(
        [("reused", True)],
        itertools.product(["default", "reused", "joint"], [False, True]),
    ),
)
def test_models_by_kernels_are_those_by_pytorch(kind, checkpointed):
    model = depth_model(kind=kind, dtype=torch.float32).to(DEVICE)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    tokens = torch.arange(8, device=DEVICE).view(2, 4)
    expected = logits_and_gradients(model, tokens, "torch")
    actual = logits_and_gradients(model, tokens, "triton")
    assert any("ffn_key" in name for name in expected) and expected.keys() == actual.keys()
    for name, exact in expected.items():
        assert_close(name, actual[name], exact, torch.float32, slack=4)  # both are float32, of several layers


def test_kernels_take_what_a_model_under_autocast_gives_them():
    model = depth_model(dtype=torch.float32).to(DEVICE)
    tokens = torch.arange(8, device=DEVICE).view(2, 4)
    expected = logits_and_gradients(model, tokens, "torch")
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = logits_and_gradients(model, tokens, "triton")
    assert_close("logits", actual["logits"], expected["logits"], torch.bfloat16, slack=4)  # of several layers


def test_models_by_kernels_launch_them(monkeypatch):
    calls = []
    op = depth_attention.__globals__["depth_attention_op"]
    monkeypatch.setitem(
        depth_attention.__globals__,
        "depth_attention_op",
        lambda *arguments: (calls.append(len(arguments[1])), op(*arguments))[1],
    )
    model = depth_model(dtype=torch.float32).to(DEVICE)
    with op_choices(backend="triton"), torch.no_grad():
        model(torch.arange(4, device=DEVICE)[None], use_cache=False)
    assert calls == list(range(1, model.config.num_hidden_layers))
