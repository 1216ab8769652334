"""Findings in results whose numbers are known, and their report: cautions, advice, table, picture and JSON."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path

import pytest
from compare.fake_results import BASE, DOMAIN, RETENTION, VALIDATION, comparison, result

from midus_hf.compare import report
from midus_hf.compare.plan import TaskOptions
from midus_hf.compare.report import Findings, Spread, advice, cautions, spread, variants_table, verdict, write_report
from midus_hf.compare.run import Point, chosen_rate

HML = [result("hml", [0.25, 0.5], [0.0, 0.125], seed=0), result("hml", [0.25, 0.75], [0.0, 0.375], seed=1)]
FULL = [result("full", [0.5, 1.0], [0.25, 1.0], seed=0), result("full", [0.5, 1.5], [0.5, 2.0], seed=1)]
FULL_SLOW = [result("full", [0.25, 0.5], [0.0, 0.25], seed=seed, rate=1e-4) for seed in (0, 1)]
NULL = [result("hml+one-row", [0.25], seed=seed, control="one-row", control_of="hml") for seed in (0, 1)]
# Runs of what was upscaled, and did not compute what the base computes: their losses start at 7 and 3.
ELSEWHERE = {"loss": 7.0, "kept": 3.0, "starts_at_base": False, "request": {"upscale": {"method": "solar"}}}
SOLAR = [result("solar", [4.0, 4.25], [-1.0, -0.5], seed=seed, **ELSEWHERE) for seed in (0, 1)]
ALL = [*HML, *FULL, *FULL_SLOW, *NULL]
TASKS = TaskOptions(names=["piqa", "mmlu"])


def found(results, variants=("hml", "full"), failures=None, missing=0, base=BASE, **changes) -> Findings:
    return report.findings(comparison(variants, **changes), base, results, failures or {}, missing)


def table_rows(one: Findings) -> dict[str, dict[str, str]]:
    """Return the rows of a table by their variant, each row by the heads of the columns."""
    table = variants_table(one)
    return {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}


def test_control_is_beaten_if_its_interval_is_above_zero():
    """More seeds than the table of Student's distribution has take its last quantile, which makes intervals wider."""
    quantiles = {2: 12.7062, 3: 4.3027, 4: 3.1824, 5: 2.7764, 6: 2.5706, 10: 2.2622, 11: 2.2281, 31: 2.2281}
    for count, quantile in quantiles.items():
        half = Spread(0.0, 2.0, count).half_interval
        assert half == pytest.approx(2.0 * quantile / math.sqrt(count), rel=5e-4)
        assert verdict(Spread(half, 2.0, count)) == "is not shown to beat it", "it reaches zero"
        assert verdict(Spread(half + 1e-9, 2.0, count)) == "beats it"
    leads = ([0.5, 0.51, 0.49], [0.5, 0.0, 0.1], [0.5], [-0.5], [0.0], [0.0, -0.05])
    expected = ["beats it", "is not shown to beat it", "one seed", *["does not beat it"] * 3]
    assert [verdict(spread(numbers)) for numbers in leads] == expected


def test_rate_is_chosen_by_validation_losses_of_the_first_seed():
    # The loss of the domain is lower at the first rate, that of the validation text at the second.
    runs = [result("a", [0.9]), result("a", [0.3], rate=1e-2)]
    for run, loss in zip(runs, (3.5, 3.25), strict=True):
        run.curve[-1].losses[VALIDATION] = loss
    assert chosen_rate(runs, [VALIDATION]) == {"learning_rate": 1e-2}
    # Of rates that are as good the first counts, and a single one needs no text.
    runs = [result("a", [0.3], rate=rate) for rate in (1e-2, 1e-3)]
    assert chosen_rate(runs, [VALIDATION]) == chosen_rate(runs[:1], []) == {"learning_rate": 1e-2}
    assert chosen_rate([], [VALIDATION]) is None
    # With only seed 1 the slow rate would be better.
    slow = [result("full", [0.5], rate=1e-4), result("full", [9.0], seed=1, rate=1e-4)]
    assert found([*FULL, *slow], variants=["full"]).variants[0].rate == "0.001"


def test_recovery_to_base_is_not_learning():
    one = found([*HML, *SOLAR], variants=["hml", "solar"])
    decreases = [report.loss_decreases(SOLAR[0], BASE, [text]) for text in (DOMAIN, RETENTION)]
    assert decreases == [[-4.0, 0.0, 0.25], [-1.0, 0.0, -0.5]]
    hml, solar = one.variants
    assert solar.learned_by_seed == {0: 0.25, 1: 0.25}
    assert solar.forgotten_by_seed == {0: 0.5, 1: 0.5}
    assert (hml.learned.mean, hml.forgotten.mean) == (0.625, 0.25)


def test_several_texts_count_alike():
    losses = [{DOMAIN: 3.0, "roses": 1.0, RETENTION: 2.0}, {DOMAIN: 1.0, "roses": 2.0, RETENTION: 5.0}]
    run = dataclasses.replace(result("a", [0.0]), curve=[Point(step, one) for step, one in enumerate(losses)])
    (variant,) = found([run], ["a"], domain={DOMAIN: "a", "roses": "b"}, validation={}).variants
    assert (variant.domain_loss.mean, variant.learned.mean, variant.forgotten.mean) == (1.5, 0.5, 3.0)


def test_advantages_are_paired_by_seed_at_the_chosen_rate():
    assert found([*HML, *NULL]).variants[0].advantages == {"one-row": spread([0.25, 0.5])}
    faster = [result("hml", [0.9], seed=seed, rate=1e-2) for seed in (0, 1)]  # its first seed chooses it
    others = [dataclasses.replace(one, seed=one.seed + 5) for one in NULL]
    assert [found([*HML, *more]).variants[0].advantages for more in ([*faster, *NULL], others)] == [{}, {}]
    # Shuffled addresses count from the saved model.
    measured = [{"shuffled": {DOMAIN: 2.5 + rise, RETENTION: 9.0}, "saved": {DOMAIN: 2.5}} for rise in (0.5, 0.25)]
    runs = [result("hml", [0.75], seed=seed, **each) for seed, each in enumerate(measured)]
    assert found(runs).variants[0].advantages == {"shuffled-addresses": spread([0.5, 0.25])}


def seeds(variant: str, learned, forgotten=0.0, parameters=1000, **changes) -> list:
    """Return runs of three seeds that learn and forget this much, or as lists say."""
    runs = zip(*(each if isinstance(each, list) else [each] * 3 for each in (learned, forgotten)), strict=True)
    return [
        result(variant, [one], [other], seed=seed, trained_parameters=parameters, **changes)
        for seed, (one, other) in enumerate(runs)
    ]


# What the first seed ended at with the two rates that are not chosen.
HML_ELSE, FULL_ELSE = ([result(name, [0.1], rate=rate) for rate in (1e-2, 1e-4)] for name in ("hml", "full"))
HML_3, FULL_3 = [*seeds("hml", 0.5), *HML_ELSE], [*seeds("full", 1.0, 0.25), *FULL_ELSE]
FAILED = {"hml/0.01/seed-0": "no memory"}
CAUTIONS = {
    "nothing": ([*HML_3, *FULL_3], {}, []),
    "one rate": (seeds("hml", 0.5), {"variants": ["hml"], "validation": {}}, []),
    "two seeds": ([*HML, *HML_ELSE, *FULL_3], {}, ["Fewer than three seeds: hml 2."]),
    "not causal": (
        [*seeds("hml", 0.5, is_causal=False), *HML_ELSE, *FULL_3], {}, ["Not causal, so losses cannot be compared: hml."]
    ),
    "an end of the rates": (
        [*HML_3, *seeds("full", 1.5, rate=1e-4), *FULL_3], {}, ["Best rate at an end of its list: full 0.0001."]
    ),
    "missing": ([*HML_3, *FULL_3], {"missing": 2}, ["Runs that are not done: 2."]),
    "failed": ([*HML_3, *FULL_3], {"failures": FAILED}, ["Failed: hml/0.01/seed-0: no memory."]),
}  # fmt: skip


@pytest.mark.parametrize(("results", "changes", "expected"), CAUTIONS.values(), ids=CAUTIONS)
def test_cautions_name_the_variants_and_runs_concerned(results, changes, expected):
    assert cautions(found(results, **changes)) == expected


A, B = seeds("a", 0.5, 0.25), seeds("b", 0.25, 0.125)
BEST_A = "At equal parameters (1,000), take a: it learned most of 2, 0.5000 nats per token."
LEAST_B = "Forgets least: b, +0.1250 nats per token, and it learned 0.2500."
NO_PAIR = "At equal parameters: no two variants that learned have as many (within 10 %)."
ONLY_A = "Forgets least: a, +0.2500 nats per token, and it learned 0.5000."
NO_TEXT = "Forgets least: no variant that learned was measured on text outside the domain."
ENOUGH = "Too few seeds to tell: nothing of the above."
TOO_FEW = "Too few seeds to tell whether a learned more than b; b forgot less than a."
ADVICE = {
    "clear": ([*A, *B], BEST_A, LEAST_B, ENOUGH),
    "within a tenth": ([*A, *seeds("b", 0.25, 0.125, 1100)], BEST_A, LEAST_B, ENOUGH),
    "unequal parameters": ([*A, *seeds("b", 0.25, 0.125, 1120)], NO_PAIR, LEAST_B, ENOUGH),
    "the larger group": (
        [run for name in "cd" for run in seeds(name, 2.0, 1.0, 10**6)] + [*A, *B, *seeds("e", 0.125, 0.25)],
        BEST_A.replace("of 2", "of 3"), LEAST_B, ENOUGH,
    ),
    "overlapping": ([*A, *seeds("b", [0.0, 0.5, 0.25], [0.5, 0.0, -0.125])], BEST_A, LEAST_B, TOO_FEW),
    "one seed": ([A[0], B[0]], BEST_A, LEAST_B, TOO_FEW),
    "not causal": ([*seeds("a", 0.5, is_causal=False), *B], NO_PAIR, LEAST_B, ENOUGH),
    "nothing learned": ([*A, *seeds("b", -0.25)], NO_PAIR, ONLY_A, ENOUGH),
    "null controls": (
        [*A, *seeds("a+one-row", [0.5, 0.0, 0.5], control="one-row", control_of="a")]
        + [*seeds("a+random-slots", 0.25, control="random-slots", control_of="a")]
        + [*seeds("a+frozen-addresses", 0.75, control="frozen-addresses", control_of="a")],
        NO_PAIR, ONLY_A, "Too few seeds to tell whether a beats one-row.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ADVICE)
def test_advice_follows_from_the_numbers(case):
    results, *expected = ADVICE[case]
    variants = list(dict.fromkeys(one.variant for one in results if one.control is None))
    assert advice(found(results, variants=variants, validation={})) == expected
    without = advice(found(results, variants=variants, validation={}, retention={}))
    assert (without[0], without[1]) == (expected[0], NO_TEXT)


def test_table_and_json_have_the_numbers_that_a_hand_computes():
    rows, deviation = table_rows(found(ALL)), 0.25 / math.sqrt(2)  # of two numbers: their distance by the root of 2
    assert list(rows) == ["base", "full", "hml", "+one-row"]
    assert set(rows["base"].values()) == {"base", ""}
    assert rows["hml"] == {
        **{"variant": "hml", "rate": "0.001", "seeds": "2", "trained": "1,000", "time": "2 s", "GB": "1.00"},
        **{"learned": f"+0.6250 ± {deviation:.4f}", "forgotten": f"+0.2500 ± {deviation:.4f}"},
    }
    assert rows["full"]["rate"] == "0.001"
    assert rows["full"]["learned"] == f"+1.2500 ± {0.5 / math.sqrt(2):.4f}"
    # Lower by 0.25 and 0.5, whose interval is 12.706 / 2 as wide as they differ.
    control = {"variant": "+one-row", "seeds": "2", "learned": f"is not shown to beat it: +0.3750 ± {12.706 / 8:.4f}"}
    assert {key: value for key, value in rows["+one-row"].items() if value} == control
    told = json.loads(json.dumps(report.as_json(found(ALL), Path("report.md")), allow_nan=False))
    full, hml = told["variants"]
    assert hml["domain_loss"] == {"mean": 2.375, "deviation": pytest.approx(deviation), "count": 2}
    assert (hml["learned"]["mean"], hml["learned_by_seed"]["1"]) == (0.625, 0.75)
    assert hml["forgotten"]["mean"] == 0.25
    assert full["rate"] == "0.001"
    assert hml["advantages"] == {"one-row": {"mean": 0.375, "deviation": pytest.approx(deviation), "count": 2}}
    assert [point["losses"][DOMAIN] for point in hml["results"][0]["curve"]] == [3.0, 2.75, 2.5]
    assert told["base_losses"][DOMAIN] == 3.0
    assert (len(told["advice"]), told["report"]) == (3, "report.md")


def test_table_has_tasks_and_only_measured_columns(tmp_path):
    runs = [result("hml", [0.5], seed=seed, tasks={"piqa": {"acc": 0.5, "acc_norm": 0.75}}) for seed in (0, 1)]
    base = dataclasses.replace(BASE, tasks={"piqa": {"acc": 0.5}, "mmlu": {"acc": 0.25}})
    rows = table_rows(found(runs, ["hml"], base=base, tasks=TASKS))
    assert [(row["piqa"], row["mmlu"]) for row in rows.values()] == [("0.500", "0.250"), ("0.750 ± 0.000", "")]
    without = found([*HML, *FULL], retention={})
    assert "forgotten" not in table_rows(without)["hml"]
    assert [one.forgotten for one in without.variants] == [None] * 2
    # By tasks only, without curves.
    kinds = {kind: {} for kind in ("domain", "retention", "validation")}
    runs = [dataclasses.replace(run, curve=[]) for run in runs]
    one = found(runs, ["hml"], base=dataclasses.replace(base, curve=[]), tasks=TASKS, controls=False, **kinds)
    assert one.variants[0].learned is None
    assert "learned" not in table_rows(one)["hml"]
    assert table_rows(one)["hml"]["piqa"] == "0.750 ± 0.000"
    assert write_report(tmp_path, one).is_file()


def test_metric_of_a_task_is_the_preferred_one():
    assert report.find_metric({"acc": 0.5, "acc_norm": 0.25}) == 0.25
    assert report.find_metric({"exact_match,first-clause": 0.5, "exact_match,any": 1.0}) == 0.5
    assert report.find_metric({"word_perplexity,none": 12.5, "byte_perplexity,none": 1.5}) == 12.5
    assert report.find_metric({"ter": 3.0}) is None


@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_report_has_table_sentences_and_picture(tmp_path, monkeypatch, has_matplotlib):
    one = found(ALL, failures={"a": "1 & 2"}, missing=1)
    if has_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        (tmp_path / "frontier.png").write_text("of an earlier report")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = write_report(tmp_path, one).read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", *["frontier.png"] * has_matplotlib}
    assert not has_matplotlib or (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert text.startswith(variants_table(one).markdown())
    assert all(f"- {sentence}\n" in text for sentence in [*cautions(one), *advice(one)])
    # Without runs there are no paths to draw.
    assert write_report(tmp_path, found([], missing=6)).read_text().endswith(f"\n- {ENOUGH}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def test_picture_is_drawn_of_any_results(monkeypatch):
    """Paths begin at the start; one whose model starts elsewhere than the base is only its end."""
    pytest.importorskip("matplotlib")
    results = [result(f"variant-{number}", [0.25]) for number in range(10)] + [result("only-the-start", []), *SOLAR]
    monkeypatch.setattr("midus_hf.compare.report.as_png", lambda figure: figure)
    figure = report.draw(found(results, variants=list(dict.fromkeys(one.variant for one in results))))
    paths = {line.get_label(): (line.get_xydata().tolist(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert paths["variant-0"] == ([[0.0, 0.0], [0.25, 0.0]], "-")
    assert paths["only-the-start"] == ([[0.0, 0.0]], "--")
    assert paths["solar"] == ([[0.25, 0.5]], "--")
