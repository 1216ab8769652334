"""Methods that promise identity compute what the base computes, bit for bit, and their new blocks train from there."""

import pytest
import torch
from tiny import prompt

from tests.upscalers.checkpoints import load, logits, read_tensors, save_base
from tests.upscalers.dense.layers import layer
from tests.upscalers.dense.requests import OUTPUT_NORMS, PROMISING, REQUESTS, upscaled

PROJECTIONS = {"self_attn.o_proj", "mlp.down_proj"}
# What is zero at first in families without and with norms behind them, and alone has a gradient in the first step.
GAINS = {"post_attention_layernorm", "post_feedforward_layernorm"}

# What one step of AdamW with learning rate 1e-4 from zero gains may change in a logit; measured are 4e-5 to 4e-4.
LARGEST_STEP = 1e-2
# A step from zero projections that a norm follows moves logits by more than this share of their spread.
JUMP = 0.5


def new_model(base, output, method: str, **options):
    """The upscaled model and the modules that are new in it."""
    upscaled(base, output, method, options=options)
    model = load(output)
    return model, [model.model.layers[index] for index in model.config.upscale["new_layers"]]


def backward(model) -> None:
    model.zero_grad()
    model(prompt(), labels=prompt()).loss.backward()


def with_gradient(block) -> set[str]:
    """Names of the parameters whose gradient is not all zero."""
    assert all(parameter.grad is not None for parameter in block.parameters())
    return {name for name, parameter in block.named_parameters() if parameter.grad.any()}


def step(model, blocks) -> float:
    """Train the blocks for one step; returns the largest change of a logit."""
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0)
    with torch.no_grad():
        before = model(prompt()).logits
    backward(model)
    optimizer.step()
    with torch.no_grad():
        return (model(prompt()).logits - before).abs().max().item()


@pytest.mark.parametrize("method", PROMISING)
def test_at_first_only_what_makes_the_identity_has_a_gradient_and_after_one_step_everything(
    native_family, method, shared_base, tmp_path
):
    model, blocks = new_model(shared_base(native_family), tmp_path / "out", method, identity="auto")
    backward(model)
    for block in blocks:
        first = GAINS if native_family in OUTPUT_NORMS else PROJECTIONS
        assert with_gradient(block) == {f"{name}.weight" for name in first}
    change = step(model, blocks)
    assert change > 0 and (native_family not in OUTPUT_NORMS or change < LARGEST_STEP)
    backward(model)
    for block in blocks:
        assert with_gradient(block) == {name for name, _ in block.named_parameters()}


@pytest.mark.parametrize(("method", "tied"), [(method, bool(number % 2)) for number, method in enumerate(PROMISING)])
def test_biases_behind_zero_projections_are_zero_as_well_and_train_from_the_first_step(method, tied, tmp_path):
    base = save_base(tmp_path / "base", attention_bias=True, mlp_bias=True, tie_word_embeddings=tied)
    model, blocks = new_model(base, tmp_path / "out", method, identity="auto")
    assert torch.equal(logits(base), logits(tmp_path / "out"))
    backward(model)
    for block in blocks:
        assert with_gradient(block) == {f"{name}.{kind}" for name in PROJECTIONS for kind in ("weight", "bias")}


@pytest.mark.parametrize(("method", "family"), list(zip(PROMISING, 2 * OUTPUT_NORMS, strict=False)))
def test_a_norm_behind_each_projection_makes_the_identity_where_a_family_has_them(
    method, family, shared_base, tmp_path
):
    options = {**REQUESTS[method].get("options", {}), "identity": "zero_out_norm"}
    report = upscaled(shared_base(family), tmp_path / "out", method, options=options)
    assert (report.promises_identity, report.identity.checked, report.identity.max_abs_diff) == (True, "blocks", 0.0)
    assert torch.equal(logits(shared_base(family)), logits(tmp_path / "out"))
    tensors = read_tensors(tmp_path / "out")
    for index in report.new_layer_indices:
        made = layer(tensors, index)
        assert made["mlp.down_proj.weight"].any() and made["self_attn.o_proj.weight"].any()


@pytest.mark.parametrize("family", OUTPUT_NORMS)
def test_one_step_from_zero_projections_that_norms_follow_is_a_jump(family, shared_base, tmp_path):
    model, blocks = new_model(shared_base(family), tmp_path / "out", "llama-pro", identity="zero_out_proj")
    with torch.no_grad():
        spread = model(prompt()).logits.std().item()
    assert step(model, blocks) > JUMP * spread
