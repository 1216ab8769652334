"""Reports of a comparison, done or not: the table, JSON and the picture."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path

import pytest
from compare.fake_results import BASE, DOMAIN, FULL, FULL_SLOW, HML, NULL, SOLAR, comparison, found, result, rows_of

from midus_hf.compare.plan import TaskOptions
from midus_hf.compare.report import advice, as_json, cautions, draw, findings, metric_of, variants_table, write_report
from midus_hf.compare.run import Point, Result

REPORT = Path("report.md")
TASKS = TaskOptions(names=["piqa", "mmlu"])


def test_table_has_the_numbers_that_a_hand_computes():
    rows = rows_of(variants_table(found([*HML, *FULL, *FULL_SLOW, *NULL])))
    # The sample deviation of two numbers is their distance by the root of 2.
    assert list(rows) == ["base", "full", "hml", "+one-row"]
    distance = 0.25 / math.sqrt(2)
    assert rows["hml"] == {
        "variant": "hml",
        "rate": "0.001",
        "seeds": "2",
        "trained": "1,000",
        "learned": f"+0.6250 ± {distance:.4f}",
        "forgotten": f"+0.2500 ± {distance:.4f}",
        "time": "2 s",
        "GB": "1.00",
    }
    assert rows["full"]["rate"] == "0.001" and rows["full"]["learned"] == f"+1.2500 ± {0.5 / math.sqrt(2):.4f}"
    # Lower by 0.25 with both seeds: the interval has no width.
    control = {"variant": "+one-row", "seeds": "2", "learned": "beats it: +0.2500 ± 0.0000"}
    assert {key: value for key, value in rows["+one-row"].items() if value} == control
    assert set(rows["base"].values()) == {"base", ""}


def test_table_has_tasks_and_only_measured_columns():
    runs = [result("hml", [0.5], seed=seed, tasks={"piqa": {"acc": 0.5, "acc_norm": 0.75}}) for seed in (0, 1)]
    base = dataclasses.replace(BASE, tasks={"piqa": {"acc": 0.5}, "mmlu": {"acc": 0.25}})
    rows = rows_of(variants_table(findings(comparison(["hml"], tasks=TASKS), base, runs, {})))
    assert [(row["piqa"], row["mmlu"]) for row in rows.values()] == [("0.500", "0.250"), ("0.750 ± 0.000", "")]
    one = found([*HML, *FULL], retention={})  # nothing is said of forgetting
    assert "forgotten" not in variants_table(one).head
    assert [variant.forgotten for variant in one.variants] == [None, None]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"acc": 0.5, "acc_norm": 0.25}, 0.25),
        ({"exact_match,first-clause": 0.5, "exact_match,any": 1.0}, 0.5),
        ({"word_perplexity,none": 12.5, "byte_perplexity,none": 1.5}, 12.5),
        ({"ter": 3.0}, None),
        ({}, None),
    ],
    ids=str,
)
def test_metric_of_a_task_is_the_preferred_one(metrics, expected):
    assert metric_of(metrics) == expected


def test_report_without_runs_has_the_base(tmp_path):
    one = found([], missing=6)
    assert list(rows_of(variants_table(one))) == ["base"]
    assert write_report(tmp_path, one).read_text().endswith("\n- Too few seeds to tell: nothing of the above.\n")
    report = as_json(one, REPORT)
    assert report["variants"] == [] and report["base_losses"][DOMAIN] == 3.0


def test_json_has_the_numbers_of_the_table_and_all_results():
    report = json.loads(json.dumps(as_json(found([*HML, *FULL, *FULL_SLOW, *NULL]), REPORT), allow_nan=False))
    full, hml = report["variants"]
    distance = pytest.approx(0.25 / math.sqrt(2))
    assert hml["domain_loss"] == {"mean": 2.375, "deviation": distance, "count": 2}
    assert hml["learned"] == {"mean": 0.625, "deviation": distance, "count": 2} and hml["learned_by_seed"]["1"] == 0.75
    assert hml["forgotten"]["mean"] == 0.25 and full["rate"] == "0.001"
    assert hml["advantages"] == {"one-row": {"mean": 0.25, "deviation": 0.0, "count": 2}}
    assert [point["losses"][DOMAIN] for point in hml["results"][0]["curve"]] == [3.0, 2.75, 2.5]
    assert len(report["advice"]) == 3 and report["report"] == "report.md"


@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_report_has_table_sentences_and_picture(tmp_path, monkeypatch, has_matplotlib):
    one = found([*HML, *FULL, *FULL_SLOW, *NULL], failures={"a": "1 & 2"}, missing=1)
    if has_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        (tmp_path / "frontier.png").write_text("of an earlier report")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = write_report(tmp_path, one).read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", *["frontier.png"] * has_matplotlib}
    assert text.startswith(variants_table(one).markdown())
    assert all(f"- {sentence}\n" in text for sentence in [*cautions(one), *advice(one), "Failed: a: 1 & 2."])


PICTURES = {
    "a start elsewhere": [result("hml", [0.1]), *SOLAR],
    "only the start": [result("hml", []), result("full", [])],
    "eleven variants": [result(f"variant-{number}", [0.1]) for number in range(11)],
}


@pytest.mark.parametrize("results", PICTURES.values(), ids=PICTURES)
def test_picture_is_drawn_of_any_results(results):
    pytest.importorskip("matplotlib")
    variants = list(dict.fromkeys(one.variant for one in results))
    assert draw(found(results, variants=variants)).startswith(b"\x89PNG")


def test_comparison_by_tasks_only_has_a_report(tmp_path):
    base = Result("base", {}, 0, [Point(0, {})], tasks={"piqa": {"acc": 0.5}})
    run = dataclasses.replace(result("hml", [0.5]), curve=[], tasks={"piqa": {"acc": 0.7, "acc_norm": 0.75}})
    changes = {kind: {} for kind in ("domain", "retention", "validation")} | {"tasks": TaskOptions(names=["piqa"])}
    one = findings(comparison(["hml"], controls=False, **changes), base, [run], {})
    table = variants_table(one)
    assert [row[:2] for row in table.rows] == [["base", ""], ["hml", "0.001"]] and "learned" not in table.head
    assert [row[table.head.index("piqa")] for row in table.rows] == ["0.500", "0.750"]
    assert write_report(tmp_path, one).is_file()
    assert one.variants[0].learned is None and json.dumps(as_json(one, tmp_path), allow_nan=False)
