"""Methods that promise identity compute what the base computes, bit for bit, in the classes of the family, and train from there."""

import pytest
import torch
from tiny import prompt

import upscalers.methods  # noqa: F401 - fills the table
from tests.upscalers.checkpoints import load, logits, read_tensors, save_base
from tests.upscalers.dense.requests import OUTPUT_NORMS, PROMISING, REQUESTS, upscaled
from upscalers.methods import contract
from upscalers.methods.contract import METHODS, register_method
from upscalers.methods.dense_block import DenseMethod
from upscalers.runs.upscale import upscale

PROJECTIONS = {"self_attn.o_proj", "mlp.down_proj"}
# What is zero at first in families without and with norms behind them, and alone has a gradient in the first step.
GAINS = {"post_attention_layernorm", "post_feedforward_layernorm"}

# What one step of AdamW with learning rate 1e-4 from zero gains may change in a logit; measured are 4e-5 to 4e-4.
LARGEST_STEP = 1e-2


def new_model(base, output, method: str, **options):
    upscaled(base, output, method, options=options)
    model = load(output)
    return model, [model.model.layers[index] for index in model.config.upscale["new_layers"]]


def backward(model) -> None:
    model.zero_grad()
    model(prompt(), labels=prompt()).loss.backward()


def with_gradient(block) -> set[str]:
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
    # Other tests make the identity of every family by `auto`.
    identity, first = ("zero_out_norm", GAINS) if native_family in OUTPUT_NORMS else ("auto", PROJECTIONS)
    base = shared_base(native_family)
    model, blocks = new_model(base, tmp_path / "out", method, identity=identity)
    assert (
        torch.equal(logits(base), logits(tmp_path / "out")) and model.config.upscale["options"]["identity"] == identity
    )
    backward(model)
    for block in blocks:
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


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_class_of_no_options_copies_the_next_layer_or_the_last_and_is_the_identity_that_it_promises(
    family, shared_base, tmp_path, monkeypatch
):
    monkeypatch.setattr(contract, "METHODS", {**METHODS})
    register_method("copies")(type("Copies", (DenseMethod,), {"summary": "copies", "paper": None, "identity": True}))
    base = shared_base(family)
    report = upscale(base=base, method="copies", output=tmp_path / "out", placement=[2, 5])
    assert report.promises_identity and torch.equal(logits(base), logits(tmp_path / "out"))
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    name = "model.layers.{}.self_attn.q_proj.weight"
    for index, source in {2: 2, 3: 2, 5: 3}.items():
        assert torch.equal(new[name.format(index)], old[name.format(source)])


def test_every_dense_method_has_a_request_here():
    dense = {name for name, method in METHODS.items() if issubclass(method, DenseMethod)}
    assert set(REQUESTS) == dense
