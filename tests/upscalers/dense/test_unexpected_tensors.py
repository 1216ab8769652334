"""Only the layer in a tensor's name moves; bases whose layers do not stand alone are refused."""

import pytest
import torch
from pairs import in_turn
from tiny import NATIVE_FAMILIES

from tests.upscalers.checkpoints import logits, read_tensors, same_bits, same_tensors, save_base, write_tensors
from tests.upscalers.dense.requests import upscaled
from tests.upscalers.methods import KINDS
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

EXPERT = "mlp.experts.{}.w1.weight"


def save_with_experts(folder):
    """A tiny Llama whose layers also hold experts, as a mixture of experts names them; no two tensors are alike."""
    base = save_base(folder)
    experts = {
        f"model.layers.{layer}.{EXPERT.format(expert)}": torch.full((2, 3), 10.0 * layer + expert)
        for layer in range(4)
        for expert in range(4)
    }
    write_tensors(base, {**read_tensors(base), **experts, "model.extra.layers.1.weight": torch.full((2,), 99.0)})
    return base


def experts_of(tensors) -> dict[int, list[float]]:
    """For each layer the value of each of its experts, in the order of their ids."""
    found: dict[int, dict[int, float]] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if ".experts." in name:
            assert parts[:2] == ["model", "layers"] and parts[3:5] == ["mlp", "experts"]
            found.setdefault(int(parts[2]), {})[int(parts[5])] = tensor[0, 0].item()
    return {layer: [experts[number] for number in range(4)] for layer, experts in sorted(found.items())}


def of_layer(layer: int) -> list[float]:
    return [10.0 * layer + expert for expert in range(4)]


@pytest.mark.parametrize(
    ("method", "sources"),
    [
        ("solar", {0: 0, 1: 1, 2: 2, 3: 1, 4: 2, 5: 3}),
        ("llama-pro", {0: 0, 1: 1, 3: 2, 4: 3}),
        ("opt-deus", {0: 0, 1: 1, 3: 2, 5: 3}),
        ("slices", {0: 0, 1: 1, 2: 2, 6: 3}),
    ],
)
def test_experts_keep_their_ids_when_their_layer_moves(method, sources, tmp_path):
    base = save_with_experts(tmp_path / "base")
    upscaled(base, tmp_path / "out", method)
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    assert experts_of(new) == {index: of_layer(source) for index, source in sources.items()}
    assert same_bits(new["model.extra.layers.1.weight"], old["model.extra.layers.1.weight"])


@pytest.mark.parametrize("method", ["solar", "avg-deus"])
def test_tensors_that_the_architecture_does_not_have_come_back_and_are_warned_of(method, tmp_path, command):
    base = save_with_experts(tmp_path / "base")
    upscaled(base, tmp_path / "out", method)
    strip(tmp_path / "out", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", base)
    outcome = command("--base", base, "--method", "llama-pro", "--output", tmp_path / "again", "--no-verify")
    said = "the base holds 17 tensors its architecture does not have; they are carried along."
    assert (outcome.status, outcome.err.strip()) == (0, f"upscale: warning: {said}")


# Of each way to make new tensors one.
METHODS = ["llama-pro", "opt-deus", "lesa", "midus-hml", "moc", "ultramem-v2", "hier-ffn"]


@pytest.mark.parametrize(("method", "family"), in_turn(METHODS, NATIVE_FAMILIES))
def test_names_without_a_prefix_stay_so_and_mean_the_same(method, family, shared_base, tmp_path):
    bases = {"out": save_base(tmp_path / "base", family, prefix=""), "usual": shared_base(family)}
    for name, base in bases.items():
        upscale(base=base, output=tmp_path / name, verify=False, **KINDS[method])
    found, usual = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "usual")
    assert found.keys() == {name.removeprefix("model.") for name in usual}
    for name, tensor in usual.items():  # what starts at random does so by its whole name
        other = found[name.removeprefix("model.")]
        assert other.shape == tensor.shape if ".memor" in name else same_bits(other, tensor)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "usual"))
