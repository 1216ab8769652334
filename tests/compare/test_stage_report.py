"""The report on stages: tables, numbers and a picture, from results whose losses are known."""

import dataclasses
import json

import pytest
from compare.made_results import rows_of

from midus_hf.compare.findings import Findings, findings
from midus_hf.compare.options import Comparison, StageOptions, VariantOptions
from midus_hf.compare.report import as_json, tables, variants_table, write_report
from midus_hf.compare.results import Point, Result
from midus_hf.compare.stage_report import backward_transfer, draw_stages, gains, stage_tables

STAGES = ("x", "y", "z")
BASE = {"x": 3.0, "y": 4.0, "z": 5.0, "stars": 2.0}
# After each stage: what the losses of the three stages and of the stars are above or below the base.
CHANGES = [(-1.0, 0.25, 0.0, 0.5), (-0.5, -1.0, 0.0, 0.25), (-0.25, -0.5, -2.0, 0.75)]


def run(seed: int, lower: float = 0.0, variant: str = "a", **changes) -> Result:
    """A run through three stages; all its losses after the start lie lower by a number."""
    points = [Point(0, 0, None, BASE)]
    for number, above in enumerate(CHANGES, start=1):
        losses = {name: loss + one - lower for (name, loss), one in zip(BASE.items(), above, strict=True)}
        points.append(Point(number, 100 * number, float(number), losses))
    return Result(variant, {}, seed, points, trained_parameters=10, tokens=300, seconds=3.0, **changes)


def found(*runs: Result) -> Findings:
    comparison = Comparison(
        base="base",
        output_dir="out",
        variants={name: VariantOptions() for name in dict.fromkeys(one.variant for one in runs)},
        train={"max_steps": 1},
        stages={name: StageOptions(corpus=f"{name}c", validation=f"{name}v", text=f"{name}t") for name in STAGES},
        retention={"stars": "stars"},
        controls=False,
    )
    validation = dict.fromkeys(comparison.validation, 3.0)
    ended = []
    for one in runs:
        last = dataclasses.replace(one.curve[-1], losses={**one.losses, **validation})
        ended.append(dataclasses.replace(one, curve=[*one.curve[:-1], last]))
    base = Result("base", {}, 0, [Point(0, 0, None, {**BASE, **validation})])
    return findings(comparison, base, ended, {})


def test_gains_are_means_over_seeds_of_what_a_text_lies_below_the_base():
    one = found(run(0), run(1, lower=0.5))
    assert gains(one, one.variants[0]) == [[1.25, 0.0, 0.25, -0.25], [0.75, 1.25, 0.25, 0.0], [0.5, 0.75, 2.25, -0.5]]
    table = stage_tables(one)[1]
    assert (table.title, table.head) == ("a: nats below the base", ["", *STAGES, "stars"])
    assert table.rows[2] == ["after z", "+0.5000", "+0.7500", "+2.2500", "-0.5000"]


def test_backward_transfer_is_what_earlier_stages_gained_since():
    # x rose by 0.75 since its stage, y by 0.5.
    assert backward_transfer([run(0)], STAGES).mean == -0.625
    spread = backward_transfer([run(0), run(1, lower=1.0)], STAGES)
    assert (spread.mean, spread.deviation) == (-0.625, 0.0)


def test_the_end_of_all_stages_is_a_row_per_variant():
    routed = [run(seed, variant="b", routed={"x": 1.0, "y": 0.5, "z": 0.75}) for seed in (0, 1)]
    one = found(run(0), run(1), *routed)
    rows = rows_of(stage_tables(one)[0])
    assert rows["a"] == {
        "variant": "a", "learned": "+0.9167 ± 0.0000", "backward transfer": "-0.6250 ± 0.0000", "forgotten": "+0.7500 ± 0.0000",
        "documents at their stage": "",
    }  # fmt: skip
    assert rows["b"]["documents at their stage"] == "75 % ± 0 %"
    row = rows_of(variants_table(one))["a"]
    assert (row["learned"], row["forgotten"]) == (rows["a"]["learned"], rows["a"]["forgotten"])


def test_other_programs_get_the_same_numbers(tmp_path):
    one = found(run(0))
    values = as_json(one, [])
    assert json.loads(json.dumps(values)) == values
    assert values["stages"]["a"]["backward_transfer"] == -0.625 and values["stages"]["a"]["texts"] == [
        *STAGES,
        "stars",
    ]
    assert values["stages"]["a"]["gains"] == gains(one, one.variants[0])


def test_the_page_has_the_tables_and_a_map_of_colours(tmp_path):
    pytest.importorskip("matplotlib")
    one = found(run(0), run(0, variant="b"))
    assert draw_stages(one).startswith(b"\x89PNG")
    write_report(tmp_path, one, [])
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "Gains after each stage" in page
    assert all(f"<h3>{table.title}</h3>" in page for table in tables(one))
    assert "documents that are measured one by one" in page
