"""How many new layers there are where the request does not say: near half of the base's, whatever their number."""

import pytest

from tests.upscalers.dense.requests import planned, tiny_config
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config
from upscalers.methods.contract import METHODS, get_method
from upscalers.plan.placements import PLACEMENTS, default_remark, place
from upscalers.request.errors import RequestError

DIVISOR = {2: 1, 3: 1, 4: 2, 5: 1, 6: 3, 7: 1, 8: 4, 9: 3, 10: 5, 11: 1, 12: 6, 13: 1}
HALF = {layers: layers // 2 for layers in range(2, 14)}
DEFAULTS = {
    "distributed": DIVISOR,
    "llama-pro": DIVISOR,
    "top-heavy": HALF,
    "bottom-heavy": HALF,
    "whole-periods": HALF,
}
"""K by L: the largest divisor up to half; half, rounded down."""
SOLAR = {3: 1, 4: 2, 5: 3, 6: 4, 7: 3, 8: 4, 9: 5, 10: 6, 11: 5, 12: 6, 13: 7}
NO_LAYER = "the base has 1 layer, and half of it is none; expected a number. Pass --num-new-layers"

get_method("solar")
INSERTING = [name for name, method in METHODS.items() if method.default_placement is not None]


def test_every_placement_has_its_defaults_here():
    assert DEFAULTS.keys() == PLACEMENTS.keys()


@pytest.mark.parametrize("num_layers", range(1, 14))
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_number_of_layers_has_a_default(placement, num_layers):
    if num_layers == 1:
        with pytest.raises(RequestError, match=NO_LAYER):
            place(placement, 1, None)
        return
    number = DEFAULTS[placement][num_layers]
    assert place(placement, num_layers, None) == place(placement, num_layers, number)
    remark = default_remark(placement, num_layers, number)
    assert (remark is None) == (2 * number == num_layers)
    if remark:
        assert remark.startswith(f"num-new-layers is {number}, by default of placement {placement}: the ")
        assert (
            f"half of the {num_layers} base layers" in remark or f"divisor of the {num_layers} base layers" in remark
        )


@pytest.mark.parametrize("num_layers", range(1, 14))
@pytest.mark.parametrize("method", INSERTING)
def test_every_method_plans_that_number_by_default(method, num_layers):
    config = tiny_config("llama", num_hidden_layers=num_layers)
    default = get_method(method).default_placement
    assert default is not None
    if num_layers == 1:
        with pytest.raises(RequestError, match=NO_LAYER):
            planned(config, method)
    else:
        assert len(planned(config, method).new_indices) == DEFAULTS[default][num_layers]


@pytest.mark.parametrize("num_layers", range(1, 14))
def test_solar_takes_the_nearest_number_that_its_stacks_allow(num_layers):
    config = tiny_config("llama", num_hidden_layers=num_layers)
    if num_layers < 3:
        with pytest.raises(RequestError, match=f"the base has {num_layers} layers; solar needs at least 3"):
            planned(config, "solar")
    else:
        assert len(planned(config, "solar").new_indices) == SOLAR[num_layers]


@pytest.mark.parametrize(("config", "number"), [(LLAMA_3_2_1B, 8), (LLAMA_3_1_8B, 16)])
def test_the_papers_models_have_the_papers_numbers_and_no_remark(config, number, tmp_path, command):
    base = write_config(tmp_path / "base", config)
    for method, placement in (("solar", None), *(("midus-hml", placement) for placement in PLACEMENTS)):
        arguments = ["--placement", placement] if placement else []
        told = command("--base", base, "--method", method, "--dry-run", "--json", *arguments)
        assert (told.status, told.err) == (0, "")
        assert len(told.json()["new_layer_indices"]) == number


REMARKS = {
    ("midus-hml", 15): "num-new-layers is 5, by default of placement distributed: the largest divisor of the 15 base layers "
    "that is at most half of them. Pass --num-new-layers or another --placement for another number.",
    ("opt-deus", 15): "num-new-layers is 7, by default of placement top-heavy: the largest number up to half of the 15 base "
    "layers that it takes. Pass --num-new-layers or another --placement for another number.",
    ("solar", 30): "num-new-layers is 16, by default of solar: the number nearest to half of the 30 base layers, the larger "
    "of two, that leaves as many layers out of each of its two stacks. Pass --num-new-layers for another.",
}  # fmt: skip


@pytest.mark.parametrize(("method", "num_layers"), REMARKS)
def test_the_command_says_which_number_it_took_and_why(method, num_layers, tmp_path, command):
    base = write_config(tmp_path / "base", {**LLAMA_3_2_1B, "num_hidden_layers": num_layers})
    remark = REMARKS[method, num_layers]
    told = command("--base", base, "--method", method, "--dry-run")
    assert (told.status, told.err) == (0, f"{remark}\n")
    number = remark.split(",")[0].split()[-1]
    asked = command("--base", base, "--method", method, "--dry-run", "--num-new-layers", number)
    assert (asked.status, asked.err) == (0, "")
    assert asked.out == told.out


def test_a_listed_placement_and_slices_are_not_remarked_on(tmp_path, command):
    base = write_config(tmp_path / "base", LLAMA_3_2_1B)
    listed = command("--base", base, "--method", "llama-pro", "--dry-run", "--placement", "1,4,7")
    sliced = command("--base", base, "--method", "slices", "--dry-run", "--set", "slices=[{layers: [0, 3]}]")
    assert [(told.status, told.err) for told in (listed, sliced)] == [(0, "")] * 2
