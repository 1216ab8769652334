"""Factors and coefficients as people and files write them."""

import json

import pytest

from tests.upscalers.checkpoints import same_tensors
from tests.upscalers.dense.requests import upscaled
from upscalers import RequestError, upscale


@pytest.mark.parametrize("number", [".nan", ".inf", "true", "much", "null", "1" + 400 * "0"])
def test_what_is_no_finite_number_is_refused(command, refused, base, tmp_path, number):
    for method, setting, what in (
        ("attenuated-copy", f"scale={{down: {number}}}", "scale.down"),
        ("slices", f"slices=[{{layers: [0, 4], scale: {{up: {number}}}}}]", "the scale of a slice.up"),
        ("linear-combination", f"coefficients={{next: {number}}}", "the coefficient of layer next"),
    ):
        outcome = command("--base", base, "--method", method, "--output", tmp_path / "out", "--set", setting)
        refused(outcome, rf"{what} is .*; expected a finite number", [])


def test_a_number_that_yaml_takes_for_text_is_a_number(base, tmp_path):
    upscaled(base, tmp_path / "text", "attenuated-copy", options={"scale": {"down": "5e-1"}})
    upscaled(base, tmp_path / "number", "attenuated-copy", options={"scale": {"down": 0.5}})
    assert same_tensors(tmp_path / "text", tmp_path / "number")


@pytest.mark.parametrize("coefficients", [{0: 0.5, "next": 0.5}, [{0: 1.0}, {1: 0.25, "previous": "75e-2"}]])
def test_recorded_coefficients_make_the_same_model_again(base, tmp_path, coefficients):
    upscaled(base, tmp_path / "out", "linear-combination", options={"coefficients": coefficients})
    record = json.loads((tmp_path / "out" / "upscale.json").read_text())
    upscaled(base, tmp_path / "again", "linear-combination", options=record["options"])
    assert same_tensors(tmp_path / "out", tmp_path / "again")


def test_a_preset_that_is_no_word_is_refused(base):
    with pytest.raises(RequestError, match=r"preset is \['release'\]; expected one of: release"):
        upscale(base=base, method="lesa", dry_run=True, options={"preset": ["release"]})


def test_a_card_and_a_table_tell_of_layers_that_were_only_left_out(command, base, tmp_path):
    shown = command(
        "--base", base, "--method", "slices", "--output", tmp_path / "out", "--set", "slices=[{layers: [0, 3]}]"
    )
    assert shown.status == 0
    assert "3, new: none" in shown.out
    assert "(4 layers) as 3 layers, 0 of them new" in (tmp_path / "out" / "README.md").read_text()


def test_nothing_but_warnings_goes_to_standard_error(command, base, tmp_path):
    outcome = command("--base", base, "--method", "llama-pro", "--output", tmp_path / "out", "--json")
    assert (outcome.status, outcome.err) == (0, "")
