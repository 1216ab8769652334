"""The numbers in new layers: means, linear combinations and scales, against formulas in float64, and numbers as people write them."""

from fractions import Fraction

import pytest
import torch

from tests.upscalers.checkpoints import (
    load,
    read_tensors,
    record_of,
    same_bits,
    same_tensors,
    save_base,
    write_tensors,
)
from tests.upscalers.dense.layers import coarsen, layer, same_layers
from tests.upscalers.dense.requests import OUTPUT_NORMS, REQUESTS, upscaled
from upscalers.runs.upscale import upscale
from upscalers.tensors.recipes import Combine

# Families whose norms multiply by 1 + weight.
UNIT_OFFSET = ("gemma2", "gemma3")

ROLES = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "output_projection",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
}


def role_of(family: str, name: str) -> str:
    """What a tensor does, written out for each name of each family."""
    module = name.rpartition(".")[0]
    if module in ROLES:
        return ROLES[module]
    if family in ("llama", "qwen2", "qwen3", "mistral"):
        return {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}[module]
    return {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_output_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_output_norm",
    }[module]


def combined(family: str, name: str, terms) -> torch.Tensor:
    """`sum c x`, of gains where norms multiply by 1 + weight; cast once."""
    offset = 1.0 if "norm" in name and family in UNIT_OFFSET else 0.0
    total = sum(coefficient * (tensor.double() + offset) for tensor, coefficient in terms)
    return (total - offset).to(terms[0][0].dtype)


def check_layer(family: str, new, index: int, old, coefficients) -> None:
    """Compare a new layer with the formula.

    Args:
        family: Of the model.
        new: Tensors of the result.
        index: The new layer.
        old: Tensors of the base.
        coefficients: By role, or `...` for every other one: of each base layer.
    """
    result = layer(new, index)
    assert result.keys() == layer(old, 0).keys()
    for name, tensor in result.items():
        chosen = coefficients.get(role_of(family, name), coefficients[...])
        terms = [(layer(old, source)[name], coefficient) for source, coefficient in chosen.items()]
        assert torch.equal(tensor, combined(family, name, terms)), name


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def coarse_base(request, native_family, tmp_path):
    """A base of every family whose linear combinations are exact in float32."""
    base = save_base(tmp_path / "base", native_family, getattr(torch, request.param))
    coarsen(base)
    return base


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_mean_of_large_float16_values_does_not_overflow(family, tmp_path):
    base = save_base(tmp_path / "base", family, torch.float16)
    tensors = {name: torch.full_like(tensor, 60000.0) for name, tensor in read_tensors(base).items()}
    write_tensors(base, tensors)
    upscaled(base, tmp_path / "out", "avg-deus")
    assert all((tensor == 60000.0).all() for tensor in read_tensors(tmp_path / "out").values())


@pytest.mark.parametrize(
    ("coefficients", "terms"),
    [
        ({"previous": 0.5, "next": 0.75, "previous-1": -0.25}, [{1: 0.5, 2: 0.75, 0: -0.25}, {2: 0.5, 3: 0.75, 1: -0.25}]),
        ({"next": 0.5, "next - 1": 0.25, 0: 1}, [{2: 0.5, 1: 0.25, 0: 1.0}, {3: 0.5, 2: 0.25, 0: 1.0}]),
        ({"previous": 1, "next": 1}, [{1: 1.0, 2: 1.0}, {2: 1.0, 3: 1.0}]),
        ({3: 0.25}, [{3: 0.25}, {3: 0.25}]),
        ({"next": 0.5, "previous+1": 0.25}, [{2: 0.75}, {3: 0.75}]),
        ([{"previous": 2, 0: -0.5}, {1: 0.125, "next": 1}], [{1: 2.0, 0: -0.5}, {1: 0.125, 3: 1.0}]),
    ],
    ids=str,
)  # fmt: skip
def test_a_linear_combination_is_the_sum_of_the_layers_times_their_coefficients_cast_once(
    native_family, coefficients, terms, coarse_base, tmp_path
):
    base = coarse_base
    upscaled(base, tmp_path / "out", "linear-combination", options={"coefficients": coefficients})
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    for index, arguments in zip((2, 4), terms, strict=True):
        check_layer(native_family, new, index, old, {...: arguments})


def test_the_provenance_of_a_linear_combination_has_the_coefficients_in_the_order_of_the_sources(base, tmp_path):
    options = {"coefficients": {"previous": 0.25, "next": 0.5, 0: 0.125}}
    upscaled(base, tmp_path / "out", "linear-combination", options=options, placement="2")
    entry = load(tmp_path / "out").config.upscale["plan"][2]
    assert entry == {"previous": 1, "next": 2, "sources": [2, 1, 0], "coefficients": [0.5, 0.25, 0.125]}


def test_an_attenuated_copy_scales_what_writes_to_the_residual_stream(native_family, coarse_base, tmp_path):
    options = {"scale": {"query": 0.75, "down": 0.5, "output_projection": 0.25, "mlp_norm": 0.5, "key": 0}}
    if native_family == "olmo2":
        del options["scale"]["mlp_norm"]
    upscaled(coarse_base, tmp_path / "out", "attenuated-copy", options=options)
    old, new = read_tensors(coarse_base), read_tensors(tmp_path / "out")
    for index, source in ((2, 1), (5, 3)):
        factors = {role: {source: factor} for role, factor in options["scale"].items()}
        check_layer(native_family, new, index, old, {**factors, ...: {source: 1.0}})


def test_by_default_an_attenuated_copy_adds_half_the_power_that_the_layer_adds(native_family, shared_base, tmp_path):
    upscaled(shared_base(native_family), tmp_path / "out", "attenuated-copy")
    old, new = read_tensors(shared_base(native_family)), read_tensors(tmp_path / "out")
    scaled = {"output_projection", "down"}
    if native_family in OUTPUT_NORMS:
        scaled = {"attention_output_norm", "mlp_output_norm"}
    for name, tensor in layer(new, 2).items():
        source = layer(old, 1)[name]
        if role_of(native_family, name) in scaled:
            torch.testing.assert_close(
                tensor, combined(native_family, name, [(source, 0.5**0.5)]), rtol=1e-6, atol=2e-7
            )
            assert not torch.allclose(tensor, source)
        else:
            assert same_bits(tensor, source)


def test_slices_scale_by_role_and_others_means_every_other_role(native_family, coarse_base, tmp_path):
    slices = [
        {"layers": [0, 2]},
        {"layers": [1, 3], "scale": {"down": 0.5, "gate": 0}},
        {"layers": [0, 1], "scale": {"others": 0.25, "query": 1.5, "key": 1}},
        {"layers": [2, 4], "scale": {"up": 1.0}},
    ]
    upscaled(coarse_base, tmp_path / "out", "slices", options={"slices": slices})
    old, new = read_tensors(coarse_base), read_tensors(tmp_path / "out")
    for index, source in ((0, 0), (1, 1), (5, 2), (6, 3)):
        assert same_layers(layer(new, index), layer(old, source))
    for index, source in ((2, 1), (3, 2)):
        check_layer(native_family, new, index, old, {"down": {source: 0.5}, "gate": {source: 0.0}, ...: {source: 1.0}})
    others = {"query": {0: 1.5}, "key": {0: 1.0}, ...: {0: 0.25}}
    check_layer(native_family, new, 4, old, others)
    assert load(tmp_path / "out").config.upscale["new_layers"] == [2, 3, 4]


@pytest.mark.parametrize("method", ["avg-deus", "linear-combination", "attenuated-copy", "slices"])
def test_a_tensor_of_a_new_layer_has_the_dtype_of_its_sources(method, tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    mixed = {
        name: tensor.float() + 2**-12 if "norm" in name else tensor for name, tensor in read_tensors(base).items()
    }
    write_tensors(base, mixed)
    upscaled(base, tmp_path / "out", method)
    new = read_tensors(tmp_path / "out")
    for index in load(tmp_path / "out").config.upscale["new_layers"]:
        assert {n: t.dtype for n, t in layer(new, index).items()} == {n: t.dtype for n, t in layer(mixed, 0).items()}


@pytest.mark.parametrize("trainable", ["all", "new"])
def test_what_is_trained_after_slices_is_chosen(base, tmp_path, trainable):
    slices = [{"layers": [0, 3]}, {"layers": [1, 4], "scale": {"down": 0.5}}, {"layers": [3, 4]}]
    report = upscaled(base, tmp_path / "out", "slices", options={"slices": slices, "trainable": trainable})
    new = 3 * sum(tensor.numel() for tensor in layer(read_tensors(base), 0).values())
    assert load(tmp_path / "out").config.upscale["trainable"] == trainable
    assert (report.parameters.new, report.parameters.total) == (new, report.parameters.base + new)
    assert report.parameters.trainable == (report.parameters.total if trainable == "all" else new)


@pytest.mark.parametrize("number", [".nan", ".inf", "true", "false", "much", "null", "", "1" + 400 * "0"])
def test_what_is_no_finite_number_is_refused(command, refused, base, tmp_path, number):
    for method, setting, kind in (
        ("attenuated-copy", f"scale={{down: {number}}}", "scale.down"),
        ("slices", f"slices=[{{layers: [0, 4], scale: {{up: {number}}}}}]", "the scale of a slice.up"),
        ("linear-combination", f"coefficients={{next: {number}}}", "the coefficient of layer next"),
    ):
        outcome = command("--base", base, "--method", method, "--output", tmp_path / "out", "--set", setting)
        refused(outcome, rf"{kind} is .*; expected a finite number", [])


def test_a_number_that_yaml_takes_for_text_is_a_number(base, tmp_path):
    upscaled(base, tmp_path / "text", "attenuated-copy", options={"scale": {"down": "5e-1"}})
    upscaled(base, tmp_path / "number", "attenuated-copy", options={"scale": {"down": 0.5}})
    assert same_tensors(tmp_path / "text", tmp_path / "number")


@pytest.mark.parametrize("coefficients", [{0: 0.5, "next": 0.5}, [{0: 1.0}, {1: 0.25, "previous": "75e-2"}]])
def test_recorded_coefficients_make_the_same_model_again(base, tmp_path, coefficients):
    upscaled(base, tmp_path / "out", "linear-combination", options={"coefficients": coefficients})
    upscaled(base, tmp_path / "again", "linear-combination", options=record_of(tmp_path / "out")["options"])
    assert same_tensors(tmp_path / "out", tmp_path / "again")


def test_a_card_and_a_table_tell_of_layers_that_were_only_left_out(command, base, tmp_path):
    shown = command(
        "--base", base, "--method", "slices", "--output", tmp_path / "out", "--set", "slices=[{layers: [0, 3]}]"
    )
    assert shown.status == 0
    assert "3, new: none" in shown.out
    assert "(4 layers) as 3 layers, 0 of them new" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("attenuated-copy", "scale={down: 1e39}"),
        ("linear-combination", "coefficients={previous: 1e39}"),
        ("lesa", "learning_rate=1e30"),
    ],
)
@pytest.mark.parametrize("verify", ["--verify", "--no-verify"])
def test_weights_that_come_out_infinite_are_refused(command, refused, base, tmp_path, method, setting, verify):
    arguments = ("--base", base, "--method", method, "--output", tmp_path / "out", "--set", setting, verify)
    refused(command(*arguments), "came out as NaN or infinite, though what it is made from is finite", [])


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


def test_a_factor_is_applied_in_float64(native_family, tmp_path):
    base = save_double(tmp_path / "base", native_family)
    norm, unit = native_family in OUTPUT_NORMS, float(native_family in UNIT_OFFSET)
    name = "post_feedforward_layernorm.weight" if norm else "mlp.down_proj.weight"
    role = "mlp_output_norm" if norm else "down"
    upscaled(base, tmp_path / "out", "attenuated-copy", placement="2", options={"scale": {role: 0.3}})
    source = layer(read_tensors(base), 1)[name]
    made = layer(read_tensors(tmp_path / "out"), 2)[name]
    torch.testing.assert_close(made, (source + unit * norm) * 0.3 - unit * norm, rtol=0, atol=4e-16)


def test_sums_are_those_of_exact_numbers(tmp_path):
    base = save_double(tmp_path / "base")
    coefficients = {0: 0.5, 1: 0.25, 3: -0.125}
    upscaled(base, tmp_path / "out", "linear-combination", placement="2", options={"coefficients": coefficients})
    old, name = read_tensors(base), "input_layernorm.weight"
    for position, value in enumerate(layer(read_tensors(tmp_path / "out"), 2)[name].tolist()):
        exact = sum(Fraction(layer(old, i)[name][position].item()) * Fraction(c) for i, c in coefficients.items())
        assert abs(Fraction(value) - exact) <= Fraction(1, 2**52)


def test_one_fine_source_is_enough():
    sources = {"coarse": torch.tensor([1.0, 2.0]), "fine": torch.tensor([1e-12, 2e-12], dtype=torch.float64)}
    exact = sources["coarse"].double() + sources["fine"]
    made = Combine((2,), (("coarse", 1.0), ("fine", 1.0))).build(sources.__getitem__)
    assert torch.equal(made, exact)
    swapped = Combine((2,), (("fine", 1.0), ("coarse", 1.0)), 0.1).build(sources.__getitem__)
    assert torch.equal(swapped, exact + 0.1)
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
