"""The numbers in new layers: means against formulas in float64, their dtypes, and weights that come out infinite."""

import pytest
import torch

from tests.upscalers.checkpoints import layer, load, read_tensors, save_base, write_tensors
from tests.upscalers.dense.requests import REQUESTS, upscaled
from upscalers.runs.upscale import upscale
from upscalers.tensors.recipes import Combine


def coarsen(folder):
    """Round weights to multiples of 2**-9: means of two are exact in float32, so that a formula in float64 has the same bits."""
    tensors = read_tensors(folder)
    write_tensors(folder, {name: ((t.double() * 512).round() / 512).to(t.dtype) for name, t in tensors.items()})
    assert all(tensor.any() for tensor in read_tensors(folder).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_mean_is_cast_once_in_every_family(native_family, dtype, tmp_path):
    base = save_base(tmp_path / "base", native_family, dtype)
    coarsen(base)
    upscaled(base, tmp_path / "out", "avg-deus")
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    for index, source in ((2, 1), (4, 2)):
        previous, following = layer(old, source), layer(old, source + 1)
        assert layer(new, index).keys() == previous.keys()
        for name, tensor in layer(new, index).items():
            mean = (previous[name].double() + following[name].double()) / 2
            assert torch.equal(tensor, mean.to(dtype)), name


@pytest.mark.parametrize("method", ["avg-deus", "llama-pro"])
def test_a_tensor_of_a_new_layer_has_the_dtype_of_its_sources(method, tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    mixed = {name: t.float() + 2**-12 if "norm" in name else t for name, t in read_tensors(base).items()}
    write_tensors(base, mixed)
    upscaled(base, tmp_path / "out", method)
    new = read_tensors(tmp_path / "out")
    for index in load(tmp_path / "out").config.upscale["new_layers"]:
        assert {n: t.dtype for n, t in layer(new, index).items()} == {n: t.dtype for n, t in layer(mixed, 0).items()}


def save_double(folder):
    """A base with weights that float32 cannot hold."""
    base = save_base(folder, dtype=torch.float64)
    fine = {name: tensor * (1 + 1e-11) for name, tensor in read_tensors(base).items()}
    write_tensors(base, fine)
    assert not any(torch.equal(tensor, tensor.float().double()) for tensor in fine.values())
    return base


@pytest.mark.parametrize("method", REQUESTS)
def test_every_method_keeps_float64_and_its_copies(method, tmp_path):
    base = save_double(tmp_path / "base")
    upscaled(base, tmp_path / "out", method, verify=True)
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    assert all(tensor.dtype == torch.float64 for tensor in new.values())
    assert torch.equal(new["model.embed_tokens.weight"], old["model.embed_tokens.weight"])
    assert torch.equal(new["model.layers.0.mlp.up_proj.weight"], old["model.layers.0.mlp.up_proj.weight"])
    if method != "lesa":  # which predicts in float32
        assert not any(torch.equal(tensor, tensor.float().double()) for tensor in new.values() if tensor.any())


def test_one_fine_source_is_enough():
    sources = {"coarse": torch.tensor([1.0, 2.0]), "fine": torch.tensor([1e-12, 2e-12], dtype=torch.float64)}
    exact = sources["coarse"].double() + sources["fine"]
    made = Combine((2,), (("coarse", 1.0), ("fine", 1.0))).build(sources.__getitem__)
    assert torch.equal(made, exact)
    swapped = Combine((2,), (("fine", 1.0), ("coarse", 1.0))).build(sources.__getitem__)
    assert torch.equal(swapped, exact)
    narrow = Combine((2,), (("coarse", 0.1),)).build(lambda name: sources[name].bfloat16())
    assert narrow.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_narrower_output_is_rounded_once(dtype, tmp_path):
    base = save_double(tmp_path / "base")
    upscale(base=base, method="avg-deus", output=tmp_path / "out", placement="2", dtype=dtype, verify=False)
    old, new = read_tensors(base), layer(read_tensors(tmp_path / "out"), 2)
    for name, tensor in new.items():
        exact = layer(old, 2)[name] * 0.5 + layer(old, 1)[name] * 0.5
        assert torch.equal(tensor, exact.to(getattr(torch, dtype))), name
