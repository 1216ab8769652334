"""OpT-DeUS makes the blocks of its definition, on every family and with every option."""

import dataclasses
from functools import cache

import pytest
import torch

from tests.upscalers.checkpoints import read_tensors, save_base, write_tensors
from tests.upscalers.dense import opt_deus_reference
from tests.upscalers.dense.layers import layer
from tests.upscalers.dense.opt_deus_reference import Settings
from upscalers.runs.upscale import upscale

OPTIONS = {
    "default": {},
    "raw": {"plan_scale": "raw"},
    "residual mean": {"mlp_t_in": "residual_mean"},
    "raw residual mean": {"plan_scale": "raw", "mlp_t_in": "residual_mean"},
    "no identity": {"identity": "none"},
    "zero projections": {"identity": "zero_out_proj"},
    "other regularization": {"regularization": 0.2},
    "exact": {"solver": "hungarian", "identity": "none"},
}
BIASES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"attention_bias": True},
    "gemma2": {"attention_bias": True},
    "gemma3": {"attention_bias": True},
    "olmo2": {"attention_bias": True},
}
# The weights of tiny models lie so close that any plan is nearly uniform: multiplied by this, plans have a shape.
SHARPER = 8


@pytest.fixture(scope="module")
def sharp_base(tmp_path_factory):
    """A base with distances between rows well above the regularization; nobody may change it."""

    @cache
    def saved(family: str, biases: bool = False):
        folder = tmp_path_factory.mktemp("base") / f"{family}{biases}"
        save_base(folder, family, **(BIASES[family] if biases else {}))
        write_tensors(
            folder,
            {
                name: tensor * SHARPER if tensor.dim() == 2 and ".layers." in name else tensor
                for name, tensor in read_tensors(folder).items()
            },
        )
        return folder

    return saved


def made(base, output, family, settings: Settings, new: int = 2, **options) -> tuple[dict, dict]:
    """The new block that stands at `new`, and the one of the definition, from the base layers on both sides."""
    given = dataclasses.asdict(settings) | {"tolerance": 1e-9} | options
    upscale(base=base, method="opt-deus", output=output, placement=str(new), options=given, verify=False)
    before = read_tensors(base)
    expected = opt_deus_reference.block(family, layer(before, new - 1), layer(before, new), settings)
    return layer(read_tensors(output), new), expected


def compare(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor.double(), expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("options", OPTIONS)
def test_every_tensor_of_a_new_block_is_the_one_of_the_definition(native_family, options, sharp_base, tmp_path):
    compare(*made(sharp_base(native_family), tmp_path / "out", native_family, Settings(**OPTIONS[options])))


@pytest.mark.parametrize("family", BIASES)
@pytest.mark.parametrize("options", ["default", "raw", "no identity"])
def test_biases_follow_the_rows_they_belong_to(family, options, sharp_base, tmp_path):
    found, expected = made(sharp_base(family, True), tmp_path / "out", family, Settings(**OPTIONS[options]))
    assert any(name.endswith(".bias") and tensor.any() for name, tensor in found.items())
    compare(found, expected)


def test_single_precision_makes_nearly_the_same(sharp_base, tmp_path):
    options = {"precision": "float32", "tolerance": 1e-4}
    found, expected = made(sharp_base("gemma3"), tmp_path / "out", "gemma3", Settings(), **options)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-3, atol=1e-3)


def test_the_comparison_would_notice_another_definition(sharp_base, tmp_path):
    """Expect other tensors from each option: the plans of these bases differ far beyond the tolerance."""
    base = sharp_base("gemma3")
    before = read_tensors(base)
    blocks = {
        name: opt_deus_reference.block("gemma3", layer(before, 1), layer(before, 2), Settings(**options))
        for name, options in OPTIONS.items()
    }
    blocks["mean of both"] = {
        name: (tensor.double() + layer(before, 2)[name].double()) / 2 for name, tensor in layer(before, 1).items()
    }
    for one in blocks:
        for other in blocks:
            if one != other:
                differences = [(blocks[one][name] - blocks[other][name]).abs().max() for name in blocks[one]]
                assert max(differences) > 1e-3, (one, other)
