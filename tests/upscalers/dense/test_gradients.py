"""How a new block that is the identity begins to train: what has a gradient at first, and how far one step goes."""

import pytest
import torch
from tiny import prompt

from tests.upscalers.checkpoints import load, save_base
from tests.upscalers.dense.requests import OUTPUT_NORMS, PROMISING, upscaled

PROJECTIONS = {"self_attn.o_proj", "mlp.down_proj"}
# What is zero at first in families without and with norms behind them, and alone has a gradient in the first step.
GAINS = {"post_attention_layernorm", "post_feedforward_layernorm"}

# What one step of AdamW with learning rate 1e-4 may change in a logit; measured are 4e-5 to 4e-4.
LARGEST_STEP = 1e-2


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
    step(model, blocks)
    backward(model)
    for block in blocks:
        assert with_gradient(block) == {name for name, _ in block.named_parameters()}


@pytest.mark.parametrize("method", PROMISING)
def test_biases_of_zero_projections_train_from_the_first_step_as_well(tmp_path, method):
    base = save_base(tmp_path / "base", attention_bias=True, mlp_bias=True)
    model, blocks = new_model(base, tmp_path / "out", method, identity="auto")
    backward(model)
    for block in blocks:
        assert with_gradient(block) == {f"{name}.{kind}" for name in PROJECTIONS for kind in ("weight", "bias")}
    step(model, blocks)
    backward(model)
    for block in blocks:
        assert with_gradient(block) == {name for name, _ in block.named_parameters()}


@pytest.mark.parametrize("method", PROMISING)
@pytest.mark.parametrize("family", OUTPUT_NORMS)
def test_one_step_from_zero_gains_is_small(method, family, shared_base, tmp_path):
    model, blocks = new_model(shared_base(family), tmp_path / "out", method, identity="auto")
    assert 0 < step(model, blocks) < LARGEST_STEP
