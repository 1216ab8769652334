"""Which base layers the layers of the result are: the tables of SOLAR and LLaMA-Pro, and where copies come from."""

import pytest
import torch

from tests.upscalers.checkpoints import read_tensors, same_bits, save_base
from tests.upscalers.dense.layers import layer, same_layers
from tests.upscalers.dense.requests import OUTPUT_NORMS, planned, tiny_config, upscaled


def plan(num_layers: int, method: str, *request, **options):
    return planned(tiny_config("llama", num_hidden_layers=num_layers), method, *request, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_solar_copies_every_layer_byte_for_byte_and_the_rest_once(native_family, dtype, tmp_path):
    base = save_base(tmp_path / "base", native_family, getattr(torch, dtype))
    upscaled(base, tmp_path / "out", "solar")
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    for index, source in enumerate([0, 1, 2, 1, 2, 3]):
        assert same_layers(layer(new, index), layer(old, source))
    outer = {name for name in old if ".layers." not in name}
    assert {name for name in new if ".layers." not in name} == outer
    assert all(same_bits(new[name], old[name]) for name in outer)
    assert len(new) == len(outer) + 6 * len(layer(old, 0))


@pytest.mark.parametrize(
    ("placement", "sources"),
    [
        ("llama-pro", [3, 7, 11, 15]),
        ("distributed", [2, 6, 10, 14]),
        ("top-heavy", [11, 12, 13, 14]),
        ("bottom-heavy", [0, 0, 1, 2]),
        ("0,1,9,19", [0, 0, 6, 15]),
    ],
)
def test_llama_pro_copies_the_layer_before_wherever_it_stands_and_the_first_where_there_is_none(placement, sources):
    result = plan(16, "llama-pro", 4, placement)
    assert [result.layers[index].sources for index in result.new_indices] == [(source,) for source in sources]


@pytest.mark.parametrize(
    ("placement", "neighbours"),
    [
        ("top-heavy", [(12, 11), (13, 12), (14, 13), (15, 14)]),
        ("distributed", [(3, 2), (7, 6), (11, 10), (15, 14)]),
        ("3,4,12", [(3, 2), (3, 2), (10, 9)]),
    ],
)
def test_avg_deus_fuses_the_layers_on_both_sides_and_takes_the_attention_type_of_the_next(placement, neighbours):
    result = plan(16, "avg-deus", len(neighbours), placement)
    assert [result.layers[index].sources for index in result.new_indices] == neighbours


def test_llama_pro_copies_byte_for_byte_what_does_not_make_the_identity(native_family, shared_base, tmp_path):
    base = shared_base(native_family)
    upscaled(base, tmp_path / "out", "llama-pro")
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    for index, source in enumerate([0, 1, 1, 2, 3, 3]):
        found, expected = layer(new, index), layer(old, source)
        assert found.keys() == expected.keys()
        changed = {name for name in found if not same_bits(found[name], expected[name])}
        if index not in (2, 5):
            assert not changed
        elif native_family in OUTPUT_NORMS:
            assert changed == {"post_attention_layernorm.weight", "post_feedforward_layernorm.weight"}
            assert all((found[name] == (0 if native_family == "olmo2" else -1)).all() for name in changed)
        else:
            assert changed == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
            assert not any(found[name].any() for name in changed)


@pytest.mark.parametrize(
    ("slices", "sources"),
    [
        ([[0, 3], [1, 4]], [0, 1, 2, 1, 2, 3]),
        ([[0, 1], [0, 1], [0, 1]], [0, 0, 0]),
        ([[2, 4], [0, 2]], [2, 3, 0, 1]),
        ([[1, 3]], [1, 2]),
    ],
)
def test_slices_are_taken_in_the_order_given_byte_for_byte(native_family, slices, sources, shared_base, tmp_path):
    base = shared_base(native_family)
    options = {"slices": [{"layers": given} for given in slices]}
    report = upscaled(base, tmp_path / "out", "slices", options=options, verify=True)
    assert report.num_layers == len(sources)
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    for index, source in enumerate(sources):
        assert same_layers(layer(new, index), layer(old, source))
    assert {name: same_bits(new[name], old[name]) for name in new if ".layers." not in name} == {
        name: True for name in old if ".layers." not in name
    }
