"""Factors and coefficients as people and files write them."""

import re

import pytest

from tests.upscalers.checkpoints import read_tensors, record_of, same_tensors, save_base, write_tensors
from tests.upscalers.dense.requests import settings, upscaled


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
    record = record_of(tmp_path / "out")
    upscaled(base, tmp_path / "again", "linear-combination", options=record["options"])
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


@pytest.mark.parametrize("method", ["solar", "avg-deus"])
def test_nan_in_the_base_is_refused_unless_it_is_allowed(method, tmp_path, command, refused):
    base = save_base(tmp_path / "base")
    tensors = read_tensors(base)
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = float("nan")
    write_tensors(base, tensors)
    usual = ("--base", base, "--method", method, *settings(method), "--output", tmp_path / "out")
    message = (
        "model.layers.2.mlp.down_proj.weight holds NaN; expected finite weights. Repair the base, or pass --allow-nan"
    )
    refused(command(*usual), message, ["base"])
    assert command(*usual, "--allow-nan").status == 0


@pytest.mark.parametrize(
    ("family", "role", "norm"),
    [
        ("qwen3", "query", "query_norm"),
        ("gemma3", "key", "key_norm"),
        ("gemma2", "down", "mlp_output_norm"),
        ("olmo2", "output_projection", "attention_output_norm"),
    ],
)
def test_a_factor_in_front_of_a_norm_is_said_to_change_nothing(command, shared_base, family, role, norm):
    for method, setting in (
        ("attenuated-copy", "scale={{{}: {}, up: 0.5}}"),
        ("slices", "slices=[{{layers: [0, 4]}}, {{layers: [2, 4], scale: {{{}: {}, up: 0.5}}}}]"),
    ):
        for base, factor, told in ((family, 0.5, True), (family, 0, False), (family, 1, False), ("llama", 0.5, False)):
            words = (
                "--method",
                method,
                "--dry-run",
                "--set",
                setting.format("down" if base == "llama" else role, factor),
            )
            outcome = command("--base", shared_base(base), *words)
            message = f"scale.{role} changes nothing in {base}.*: a norm follows. Scale {norm} instead"
            assert outcome.status == 0 and (re.search(message, outcome.err) is not None) == told, outcome.err


def test_names_with_brackets_are_shown_as_they_are(command, tmp_path):
    base = save_base(tmp_path / "x[/red]")
    shown = command("--base", base, "--method", "llama-pro", "--output", tmp_path / "a[b]c")
    assert shown.status == 0, shown.err
    told = "".join(shown.out.split())  # long paths are folded
    assert "x[/red]" in told and "a[b]c" in told
    assert "[first, end]" in command("methods", "slices").out
