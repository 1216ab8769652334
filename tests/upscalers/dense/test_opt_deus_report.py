"""What OpT-DeUS tells of its plans, what it warns of, and the preset of the released code."""

import re

import pytest
import torch

from tests.upscalers.checkpoints import config_of, read_tensors, record_of, same_tensors, save_base
from tests.upscalers.dense.layers import layer
from tests.upscalers.dense.opt_deus_reference import PRE_NORM
from tests.upscalers.solvers import sinkhorn_loop
from tests.upscalers.solvers.recording import Recorder
from upscalers.request.errors import RequestError
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.upscale import upscale

SOLVED = ["query", "key", "value", "output_projection", "gate", "up"]
COLUMNS = ["norm_ratio", "effective_sources", "iterations", "residual", "seconds"]
WEAK = (
    r"matched rows keep little of their norm \(.*\): they have no counterparts, so that what is fused is near half the next "
    r"layer's\. solver=hungarian keeps it\."
)
LATE = (
    r"Sinkhorn did not converge for \w+ of new layers 2, 4: residual 0\.\d+ after 1 iterations, expected at most 0\.0001\. "
    r"Raise max_iterations, tolerance or regularization\."
)


def fused(base, output, verify=False, **options):
    """The report, and what was told meanwhile."""
    recorder = Recorder()
    report = upscale(base=base, method="opt-deus", output=output, options=options, verify=verify, progress=recorder)
    return report, recorder


def test_each_matrix_that_is_solved_is_measured_in_the_order_of_the_layers(native_family, shared_base, tmp_path):
    report, recorder = fused(shared_base(native_family), tmp_path / "out")
    roles = SOLVED if native_family in PRE_NORM else [*SOLVED, "down"]
    assert [(row["layer"], row["tensor"]) for row in report.measurements] == [(i, r) for i in (2, 4) for r in roles]
    assert all(list(row)[2:] == COLUMNS for row in report.measurements)
    assert recorder.balanced and recorder.expected.keys() == {"layer 2", "layer 4"}


def test_the_numbers_are_those_of_the_plans(shared_base, tmp_path):
    base = shared_base("llama")
    report, _ = fused(base, tmp_path / "out", tolerance=1e-9)
    previous, following = (layer(read_tensors(base), index) for index in (1, 2))
    for row in report.measurements[:3]:
        name = f"self_attn.{row['tensor'][0]}_proj.weight"
        source, target = previous[name].double(), following[name].double()
        plan = sinkhorn_loop.plan(source, target, 0.06)
        aligned = sinkhorn_loop.barycentric(plan).mT @ source
        assert row["norm_ratio"] == pytest.approx((aligned.norm() / source.norm()).item(), rel=1e-5)
        assert row["effective_sources"] == pytest.approx(sinkhorn_loop.effective_sources(plan), rel=1e-5)
        assert row["residual"] <= 1e-9 and row["iterations"] >= 1 and row["seconds"] >= 0


def test_the_norm_ratio_of_gate_and_up_is_to_the_previous_layers_matrix(base, tmp_path):
    """Not to what the output projection's plan left of it, which may be next to nothing."""
    report, _ = fused(base, tmp_path / "out")
    before, found = read_tensors(base), layer(read_tensors(tmp_path / "out"), 2)
    rows = {row["tensor"]: row for row in report.measurements if row["layer"] == 2}
    for role in ("gate", "up"):
        name = f"mlp.{role}_proj.weight"
        previous, following = (layer(before, index)[name].double() for index in (1, 2))
        aligned = 2 * found[name].double() - following
        assert rows[role]["norm_ratio"] == pytest.approx((aligned.norm() / previous.norm()).item(), rel=1e-3)


def test_the_preset_of_the_release_gives_half_the_next_layer(tmp_path):
    base = save_base(
        tmp_path / "base", hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=8
    )
    report, recorder = fused(base, tmp_path / "out", preset="release")
    before, found = read_tensors(base), layer(read_tensors(tmp_path / "out"), 2)
    previous, following = layer(before, 1), layer(before, 2)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        half = following[f"{name}.weight"] / 2
        assert (found[f"{name}.weight"] - half).norm() <= 1e-2 * half.norm()
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        assert not found[name].any()
    norm, both = "post_attention_layernorm.weight", "input_layernorm.weight"
    expected = 0.25 * previous[norm] + 0.5 * following[norm]
    assert (found[norm] - expected).norm() <= 1e-2 * expected.norm()
    torch.testing.assert_close(found[both], (previous[both] + following[both]) / 2)
    assert all(row["norm_ratio"] <= 1 / 128 for row in report.measurements)
    assert recorder.warnings == []  # a raw plan shrinks by design
    options = config_of(tmp_path / "out")["upscale"]["options"]
    assert {key: options[key] for key in ("plan_scale", "regularization", "mlp_t_in", "solver")} == {
        "plan_scale": "raw", "regularization": 0.06, "mlp_t_in": "o_proj", "solver": "sinkhorn",
    }  # fmt: skip


def test_rows_without_counterparts_are_warned_of(base, tmp_path, command, refused):
    report, recorder = fused(base, tmp_path / "out")
    assert len(recorder.warnings) == 1 and re.fullmatch(WEAK, recorder.warnings[0])
    for role in SOLVED:
        weakest = min(row["norm_ratio"] for row in report.measurements if row["tensor"] == role)
        assert (f"{role} {weakest:.2g}" in recorder.warnings[0]) == (weakest < 0.3), role
    strict = ("--base", base, "--method", "opt-deus", "--no-verify", "--set", "strict=true")
    outcome = command(*strict, "--output", tmp_path / "strict")
    refused(outcome, f"{WEAK} It is an error since strict is set.", ["out"])


@pytest.mark.parametrize(
    "options",
    [{"solver": "hungarian"}, {"plan_scale": "raw"}, {"regularization": 1e-4}],
    ids=str,
)
def test_what_keeps_the_norm_is_not_warned_of(options, base, tmp_path):
    _, recorder = fused(base, tmp_path / "out", max_iterations=2000, tolerance=1.9, strict=True, **options)
    assert recorder.warnings == []


def test_transport_that_does_not_converge_is_warned_of_with_its_residual(base, tmp_path):
    report, recorder = fused(base, tmp_path / "out", max_iterations=1, plan_scale="raw")
    late = recorder.warnings
    assert len(late) > 1 and all(re.fullmatch(LATE, warning) for warning in late)
    residuals = [row["residual"] for row in report.measurements if row["tensor"] == "value"]
    assert f"residual {max(residuals):.2g} after" in next(row for row in late if "for value" in row)
    with pytest.raises(RequestError, match=rf"{LATE} It is an error since strict is set\."):
        fused(base, tmp_path / "third", max_iterations=1, strict=True)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("lesa", {"epochs": 1}),
        *(("opt-deus", {"precision": precision, "identity": "none"}) for precision in ("float64", "float32")),
    ],
    ids=str,
)
def test_however_many_solvers_work_at_once_the_bytes_are_the_same(method, options, tmp_path):
    """Also where torch has threads to share out: how many work depends on the memory that happens to be free."""
    base = save_base(tmp_path / "base", hidden_size=128, intermediate_size=192, num_attention_heads=4)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for workers in (1, 2):
            request = {"output": tmp_path / str(workers), "options": {**options, "workers": workers}, "verify": False}
            upscale(base=base, method=method, num_new_layers=2, **request)
    finally:
        torch.set_num_threads(before)
    assert same_tensors(tmp_path / "1", tmp_path / "2")


@pytest.mark.parametrize(
    ("method", "columns"),
    [
        ("lesa", ["norm ratio", "cosine to mean", "directions left out"]),
        ("opt-deus", ["norm ratio", "effective sources", "iterations", "residual"]),
    ],
)
def test_the_record_the_card_the_command_and_inspect_tell_measurements(method, columns, base, tmp_path, command):
    options = ("--set", "epochs=1") if method == "lesa" else ()
    usual = ("--base", base, "--method", method, "--output", tmp_path / "out", "--no-verify", *options)
    outcome = command(*usual)
    assert outcome.status == 0
    rows = record_of(tmp_path / "out")["measurements"]
    assert list(rows[0]) == ["layer", "tensor", *(column.replace(" ", "_") for column in columns), "seconds"]
    assert rows == inspect_checkpoint(tmp_path / "out")["measurements"]
    assert rows == command("inspect", tmp_path / "out", "--json").json()["measurements"]
    card, shown = (tmp_path / "out" / "README.md").read_text(), command("inspect", tmp_path / "out").out
    assert f"| tensor | layers | {' | '.join(columns)} |\n" in card
    ratios = [row["norm_ratio"] for row in rows if row["tensor"] == "key"]
    assert f"| key | 2 | {sum(ratios) / 2:.3g} ({min(ratios):.3g} to {max(ratios):.3g}) |" in card
    for table in (outcome.out, shown):
        assert columns[0] in table and f"{sum(ratios) / 2:.3g}" in table
    assert "measurements" not in command(*usual, "--overwrite", "--json").json()
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]
