"""A base in float64 is computed with in float64: nothing is rounded on the way."""

from fractions import Fraction

import pytest
import torch

from tests.upscalers.checkpoints import load, read_tensors, save_base, write_tensors
from tests.upscalers.dense.layers import layer
from tests.upscalers.dense.requests import OUTPUT_NORMS, REQUESTS, upscaled
from upscalers.runs.upscale import upscale
from upscalers.tensors.recipes import Combine

UNIT_OFFSET = ("gemma2", "gemma3")


def save_double(folder, family: str = "llama"):
    """A base with weights that float32 cannot hold."""
    base = save_base(folder, family, torch.float64)
    generator = torch.Generator().manual_seed(5)
    fine = {
        name: tensor + 1e-11 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in read_tensors(base).items()
    }
    write_tensors(base, fine)
    assert not any(torch.equal(tensor, tensor.float().double()) for tensor in fine.values())
    return base


def test_a_mean_is_that_of_float64_in_every_family(native_family, tmp_path):
    base = save_double(tmp_path / "base", native_family)
    upscaled(base, tmp_path / "out", "avg-deus", verify=True, placement="2", num_new_layers=None)
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    previous, following = layer(old, 1), layer(old, 2)
    for name, tensor in layer(new, 2).items():
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, following[name] * 0.5 + previous[name] * 0.5), name
    assert load(tmp_path / "out").dtype == torch.float64


def test_a_factor_is_applied_in_float64(native_family, tmp_path):
    base = save_double(tmp_path / "base", native_family)
    norm, unit = native_family in OUTPUT_NORMS, float(native_family in UNIT_OFFSET)
    name = "post_feedforward_layernorm.weight" if norm else "mlp.down_proj.weight"
    role = "mlp_output_norm" if norm else "down"
    upscaled(base, tmp_path / "out", "attenuated-copy", placement="2", options={"scale": {role: 0.3}})
    source = layer(read_tensors(base), 1)[name]
    made = layer(read_tensors(tmp_path / "out"), 2)[name]
    torch.testing.assert_close(made, (source + unit * norm) * 0.3 - unit * norm, rtol=0, atol=4e-16)
    assert made.dtype == torch.float64


def test_sums_are_those_of_exact_numbers(tmp_path):
    base = save_double(tmp_path / "base")
    options = {"coefficients": {0: 0.5, 1: 0.25, 3: -0.125}}
    upscaled(base, tmp_path / "out", "linear-combination", placement="2", options=options)
    old, name = read_tensors(base), "input_layernorm.weight"
    made = layer(read_tensors(tmp_path / "out"), 2)[name]
    terms = [(layer(old, index)[name], coefficient) for index, coefficient in options["coefficients"].items()]
    for place, value in enumerate(made.tolist()):
        exact = sum(Fraction(tensor[place].item()) * Fraction(coefficient) for tensor, coefficient in terms)
        assert abs(Fraction(value) - exact) <= Fraction(1, 2**52)


@pytest.mark.parametrize("method", REQUESTS)
def test_every_method_keeps_float64_and_its_copies(method, tmp_path):
    base = save_double(tmp_path / "base")
    upscaled(base, tmp_path / "out", method, verify=True)
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    assert all(tensor.dtype == torch.float64 for tensor in new.values())
    assert torch.equal(new["model.embed_tokens.weight"], old["model.embed_tokens.weight"])
    assert torch.equal(new["model.layers.0.mlp.up_proj.weight"], old["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_narrower_output_is_rounded_once(dtype, tmp_path):
    base = save_double(tmp_path / "base")
    upscale(base=base, method="avg-deus", output=tmp_path / "out", placement="2", dtype=dtype, verify=False)
    old, new = read_tensors(base), layer(read_tensors(tmp_path / "out"), 2)
    for name, tensor in new.items():
        exact = layer(old, 2)[name] * 0.5 + layer(old, 1)[name] * 0.5
        assert torch.equal(tensor, exact.to(getattr(torch, dtype))), name


def test_one_fine_source_is_enough():
    coarse, fine = torch.tensor([1.0, 2.0]), torch.tensor([1e-12, 2e-12], dtype=torch.float64)
    recipe = Combine((2,), (("coarse", 1.0), ("fine", 1.0)))
    made = recipe.build({"coarse": coarse, "fine": fine}.__getitem__)
    assert torch.equal(made, coarse.double() + fine)
    swapped = Combine((2,), (("fine", 1.0), ("coarse", 1.0)), 0.1)
    made = swapped.build({"coarse": coarse, "fine": fine}.__getitem__)
    assert torch.equal(made, fine + coarse.double() + 0.1)
    assert Combine((2,), (("coarse", 0.1),)).build(lambda name: coarse.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("method", ["opt-deus"])
def test_what_transport_makes_is_as_fine(method, tmp_path):
    base = save_double(tmp_path / "base")
    upscaled(base, tmp_path / "out", method, placement="2", options={"identity": "none"})
    made = layer(read_tensors(tmp_path / "out"), 2)
    assert all(tensor.dtype == torch.float64 for tensor in made.values())
    assert not any(torch.equal(tensor, tensor.float().double()) for tensor in made.values())
