"""What a comparison found, told: tables, sentences, JSON, CSV, a page and pictures, from results whose numbers are known."""

import csv
import dataclasses
import importlib.util
import json
import math
import re

import pytest
from workbench.made_results import BASE, DOMAIN, RETENTION, comparison, result

from midus_workbench.options import TaskOptions
from midus_workbench.report.cautions import cautions
from midus_workbench.report.findings import Findings, findings, metric_of
from midus_workbench.report.tables import (
    arms_table,
    as_json,
    as_markdown,
    controls_table,
    equal_learning_table,
    short_table,
    tables,
    tuned_table,
    write_runs,
)
from midus_workbench.report.words import sentences, short_count, with_spread
from midus_workbench.report.writing import write_report
from midus_workbench.results import Measured, Point, Result

HML = [result("hml", [0.25, 0.5], [0.0, 0.125], seed=0), result("hml", [0.25, 0.75], [0.0, 0.375], seed=1)]
FULL = [result("full", [0.5, 1.0], [0.25, 1.0], seed=0), result("full", [0.5, 1.5], [0.5, 2.0], seed=1)]
FULL_SLOW = [result("full", [0.25, 0.5], [0.0, 0.25], seed=seed, rate=1e-4) for seed in (0, 1)]
NULL = [
    result("hml+one-row", [0.25, learned], seed=seed, control="one-row", control_of="hml")
    for seed, learned in ((0, 0.25), (1, 0.5))
]


def found(results, arms=("hml", "full"), failures=None, missing=0, **changes) -> Findings:
    told = comparison(arms, **changes)
    base = BASE
    if not told.retention:
        base = without_retention(BASE)
        results = [without_retention(one) for one in results]
    return findings(told, base, results, failures or {}, missing)


def without_retention(one: Result) -> Result:
    curve = [Point(point.step, point.tokens, point.seconds, {DOMAIN: point.losses[DOMAIN]}) for point in one.curve]
    return Result(**{**vars(one), "curve": curve})


def rows_of(table) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}


def test_the_table_of_arms_has_the_numbers_that_a_hand_computes():
    rows = rows_of(arms_table(found([*HML, *FULL, *FULL_SLOW])))
    # 3 - 0.5 and 3 - 0.75: 2.5 and 2.25; the sample deviation of two numbers is their distance by the root of 2.
    assert list(rows) == ["base", "full", "hml"]
    distance = 0.25 / math.sqrt(2)
    assert rows["hml"] == {
        "arm": "hml",
        "rate": "0.001",
        "seeds": "2",
        "new": "0",
        "trains": "1k",
        "domain loss": f"2.3750 ± {distance:.4f}",
        "learned": f"+0.6250 ± {distance:.4f}",
        "forgotten": f"+0.2500 ± {distance:.4f}",
        RETENTION: f"2.2500 ± {distance:.4f}",
        "seconds": "2",
        "tokens/s": "100",
        "memory, GB": "1.00",
        "starts at base": "",
    }
    assert rows["full"]["rate"] == "0.001" and rows["full"]["domain loss"] == f"1.7500 ± {0.5 / math.sqrt(2):.4f}"
    assert rows["base"]["domain loss"] == "3.0000" and rows["base"][RETENTION] == "2.0000"
    assert {key for key, value in rows["base"].items() if value} == {"arm", "domain loss", RETENTION}


def test_of_one_seed_there_is_no_spread():
    one = found([HML[0], FULL[0]])
    rows = rows_of(arms_table(one))
    assert (rows["hml"]["domain loss"], rows["hml"]["learned"], rows["hml"]["forgotten"]) == (
        "2.5000",
        "+0.5000",
        "+0.1250",
    )
    assert "One seed: nothing here says how much of a difference is chance." in sentences(one)
    assert not any("One seed" in sentence for sentence in sentences(found([*HML, *FULL])))


def test_arms_of_one_seed_beside_others_are_named():
    told = sentences(found([*HML, FULL[0]]))
    assert "full has one seed: nothing says how much of a difference to others is chance." in told
    assert not any(sentence.startswith("One seed") for sentence in told)
    told = sentences(found([*HML, FULL[0], result("moc", [0.5])], arms=("hml", "full", "moc")))
    assert "full and moc have one seed: nothing says how much of a difference to others is chance." in told


def test_it_is_told_where_the_rates_of_an_arm_were_tried_with_other_seeds():
    told = sentences(
        found([*HML, *FULL, result("full", [0.5], seed=1, rate=1e-2), result("full", [0.5], seed=2, rate=1e-2)])
    )
    assert (
        "full was not tried with the same seeds at every rate (0.001 with 0, 1; 0.01 with 1, 2): its best rate is the best of "
        "seed 1, which those of most seeds have in common."
    ) in told
    told = sentences(found([*HML, result("full", [0.5], seed=0), result("full", [0.5], seed=1, rate=1e-2)]))
    assert any(
        sentence.endswith("which have no seed in common: its best rate may be that of the luckier seed.")
        for sentence in told
    )
    told = sentences(found([*HML, *FULL, result("full", [0.9], seed=0, rate=1e-2)]))
    assert any(
        "(0.001 with 0, 1; 0.01 with 0): its best rate is the best of seeds 0, 1, which" in sentence
        for sentence in told
    )
    assert not any(
        "the same seeds at every rate" in sentence for sentence in sentences(found([*HML, *FULL, *FULL_SLOW]))
    )


def between(told: list[str], start: str) -> str:
    (sentence,) = [sentence for sentence in told if sentence.startswith(start)]
    return sentence


def test_the_first_two_are_told_apart_by_their_seeds():
    # Of seeds 0 and 1, full ends lower by 0.5 and 0.75: 0.625 in the mean, and 12.7062 / 2 * 0.25 is half of the interval.
    told = sentences(found([*HML, *FULL]))
    assert between(told, "full ends").endswith(
        "hml follows with 2.3750 ± 0.1768. The base has 3.0000. Of the same seeds these two differ by 0.6250 ± 1.5883 (95 %), "
        "which may be chance."
    )
    alike = [result("hml", [0.25], [0.25], seed=seed) for seed in (0, 1)]
    better = [result("full", [0.5], [0.0], seed=seed) for seed in (0, 1)]
    told = sentences(found([*alike, *better]))
    words = "Of the same seeds these two differ by 0.2500 ± 0.0000 (95 %), which is more than chance of seeds."
    assert between(told, "full ends").endswith(words) and between(told, "When 0.2500 nats").endswith(words)
    assert "Of the same seeds" not in " ".join(sentences(found([HML[0], FULL[0]])))


def test_unequal_tokens_are_told():
    longer = [result("full", [0.5, 0.6, 0.7], seed=seed) for seed in (0, 1)]
    assert "Arms were not trained on as many tokens: hml on 200, full on 300." in sentences(found([*HML, *longer]))
    assert not any("tokens:" in sentence for sentence in sentences(found([*HML, *FULL])))


def test_how_many_rates_arms_were_tried_at_and_which_was_the_last_is_told():
    told = sentences(found([*HML, *FULL, *FULL_SLOW]))
    assert (
        "Arms were not tried at as many rates, and more of them are more chances to end low: hml at 1, full at 2."
        in told
    )
    assert "At the lowest or highest rate that was tried, and perhaps better beyond it: full (0.001)." in told
    fast = [result("full", [0.1], seed=seed, rate=1e-2) for seed in (0, 1)]
    told = sentences(found([*FULL, *FULL_SLOW, *fast], arms=["full"]))
    assert not any("perhaps better" in sentence or "as many rates" in sentence for sentence in told)


def test_each_number_of_a_rate_has_ends_of_its_own():
    def run(learned, **rate):
        return dataclasses.replace(result("hml", [learned]), rate=rate)

    runs = [run(0.5, learning_rate=2.0, value_learning_rate=1.0)]
    runs += [run(0.1, learning_rate=rate, value_learning_rate=1.0) for rate in (1.0, 3.0)]
    assert not found(runs, arms=["hml"]).arms["hml"].is_at_an_end_of_its_rates
    higher = run(0.1, learning_rate=2.0, value_learning_rate=3.0)
    assert found([*runs, higher], arms=["hml"]).arms["hml"].is_at_an_end_of_its_rates
    assert not found([*runs, run(0.1, memory_learning_rate=9.0)], arms=["hml"]).arms["hml"].is_at_an_end_of_its_rates


def test_what_does_not_start_at_the_base_is_counted_from_it_and_named():
    start = {"loss": 7.0, "kept": 3.0, "new_parameters": 5, "starts_at_base": False}
    solar = [result("solar", [4.0, 4.25], [-1.0, -0.5], seed=seed, **start) for seed in (0, 1)]
    one = found([*HML, *solar], arms=["hml", "solar"])
    row = rows_of(arms_table(one))["solar"]
    assert (row["domain loss"], row["learned"], row["forgotten"]) == (
        "2.7500 ± 0.0000", "+0.2500 ± 0.0000", "+0.5000 ± 0.0000",
    )  # fmt: skip
    assert one.common_learning == 0.25, "and not 4.25"
    assert rows_of(equal_learning_table(one))["solar"]["change of the loss outside the domain"] == "+0.5000 ± 0.0000"
    told = sentences(one)
    assert any(sentence.startswith("solar was not seen to start at the base: what was learned") for sentence in told)
    assert not any("not seen to start" in sentence for sentence in sentences(found([*HML, *FULL])))


def test_the_short_table_is_the_same_in_fewer_columns():
    one = found([*HML, *FULL])
    short, long = rows_of(short_table(one)), rows_of(arms_table(one))
    assert short_table(one).title == "Base: domain loss 3.0000"
    for name, row in short.items():
        assert row == {key: long[name][key] for key in row}


def test_several_texts_count_alike():
    texts = {"domain": {DOMAIN: "a", "roses": "b"}}
    curve = [
        Point(0, 0, None, {DOMAIN: 3.0, "roses": 1.0, RETENTION: 2.0}),
        Point(1, 9, 1.0, {DOMAIN: 1.0, "roses": 2.0, RETENTION: 5.0}),
    ]
    one = findings(
        comparison(["a"], **texts), Result("base", {}, 0, curve[:1]), [Result("a", {}, 0, curve, seconds=3.0)], {}
    )
    row = rows_of(arms_table(one))["a"]
    assert (row["domain loss"], row["learned"], row["forgotten"], row["rate"]) == (
        "1.5000",
        "+0.5000",
        "+3.0000",
        "recipe",
    )
    assert row["tokens/s"] == "3"


def test_forgetting_at_equal_learning_is_read_off_the_paths_of_the_rate_that_is_best_for_it():
    one = found([*HML, *FULL, *FULL_SLOW])
    assert one.common_learning == 0.5
    rows = rows_of(equal_learning_table(one))
    # Of hml the second seed is halfway from (0.25, 0) to (0.75, 0.375); full is better at its slow rate, with 0.25 of both.
    assert rows["hml"]["change of the loss outside the domain"] == f"+0.1562 ± {0.0625 / math.sqrt(2):.4f}"
    assert rows["full"] == {
        "arm": "full",
        "rate": "0.0001",
        "change of the loss outside the domain": "+0.2500 ± 0.0000",
    }
    assert list(rows) == ["hml", "full"]
    assert equal_learning_table(one).title == "Forgotten when 0.5000 nats were learned"
    (told,) = [sentence for sentence in sentences(one) if "forgotten least" in sentence]
    assert told.startswith("When 0.5000 nats are learned, as 2 of 2 arms did, hml has forgotten least")
    assert "by +0.1562 ± 0.0442, that of full, the next, by +0.2500 ± 0.0000." in told


@pytest.mark.parametrize(
    ("changes", "words"),
    [((-0.5, 0.5), "has forgotten least"), ((0.25, 0.5), "has forgotten least"), ((-0.5, -0.25), "has gained most outside as well")],
    ids=str,
)  # fmt: skip
def test_where_nobody_forgot_nobody_is_said_to_have(changes, words):
    runs = [result(name, [0.5], [change]) for name, change in zip(("hml", "full"), changes, strict=True)]
    told = between(sentences(found(runs)), "When 0.5000 nats are learned")
    assert f"hml {words}: the loss outside the domain has changed by {changes[0]:+.4f}, that of full" in told


def test_arms_that_learned_less_than_half_of_them_did_are_not_compared():
    slow = [dataclasses.replace(run, arm="moc", curve=run.curve[:1] * 2) for run in HML]
    one = found([*HML, *FULL, *slow], arms=("hml", "full", "moc"))
    assert one.common_learning == 0.5, "and not what moc learned, which is nothing"
    assert list(rows_of(equal_learning_table(one))) == ["hml", "full"]
    assert any("as 2 of 3 arms did" in sentence for sentence in sentences(one))


def test_a_rate_at_which_a_seed_is_missing_or_never_learned_so_much_is_not_the_one_that_forgot_least():
    missing = [result("full", [0.5], [-9.0], seed=0, rate=1e-2)]
    slow = [result("full", [learned], [-9.0], seed=seed, rate=1e-5) for seed, learned in ((0, 0.5), (1, 0.125))]
    one = found([*HML, *FULL, *FULL_SLOW, *missing, *slow])
    assert rows_of(equal_learning_table(one))["full"]["rate"] == "0.0001"


def test_rates_over_unlike_seeds_are_compared_by_what_they_forgot_with_those_in_common():
    other = [result("full", [0.5], [forgotten], seed=seed, rate=1e-4) for seed, forgotten in ((0, 0.375), (2, 0.0))]
    row = rows_of(equal_learning_table(found([*HML, *FULL, *other])))["full"]
    # With seed 0 the first rate had forgotten 0.25; over all of its seeds 0.375, and the other 0.1875.
    assert row["rate"] == "0.001" and row["change of the loss outside the domain"].startswith("+0.3750")


def test_where_nothing_was_learned_forgetting_is_not_compared():
    # One run passes the point at which nothing is learned on its way up: that is no learning to compare at.
    one = found([result("hml", [-0.5, -0.25], [0.0, 1.0]), result("full", [-0.25, 0.5], [0.5, 1.0])])
    assert one.common_learning == 0.0
    assert "Forgotten" not in " ".join(table.title for table in tables(one))
    assert not any("forgotten least" in sentence for sentence in sentences(one))
    assert [arm["forgotten_at_equal_learning"] for arm in as_json(one, [])["arms"]] == [None, None]


def test_without_texts_outside_nothing_is_said_of_forgetting():
    one = found([*HML, *FULL], retention={})
    for table in tables(one):
        assert "forgotten" not in table.head and RETENTION not in table.head and "Forgotten" not in table.title
    assert len(arms_table(one).rows[0]) == len(arms_table(one).head)
    assert not any("forgot" in sentence for sentence in sentences(one))
    told = as_json(one, [])
    assert [arm["forgotten"] for arm in told["arms"]] == [None, None]


def test_arms_stand_beside_their_null_controls():
    one = found([*HML, *FULL, *NULL], arms=["hml", "full"])
    # Lower by 0.25 with both seeds: the interval has no width.
    assert rows_of(controls_table(one)) == {
        "hml": {
            "arm": "hml", "control": "one-row", "nats lower than the control": "+0.2500", "95 % interval": "± 0.0000",
            "seeds": "2", "": "beats it",
        }
    }  # fmt: skip
    told = as_json(one, [])["arms"][0]["controls"]
    assert told == {"one-row": {"mean": 0.25, "deviation": 0.0, "count": 2, "verdict": "beats it"}}
    assert "hml+one-row" not in rows_of(arms_table(one))
    assert not any("null control" in sentence for sentence in sentences(one))


def test_a_control_that_is_not_beaten_is_told():
    better = [result("hml+one-row", [0.9], seed=seed, control="one-row", control_of="hml") for seed in (0, 1)]
    wide = [
        result("hml+random-slots", [learned], seed=seed, control="random-slots", control_of="hml")
        for seed, learned in ((0, 0.5), (1, 0.1))
    ]
    told = sentences(found([*HML, *better, *wide], arms=["hml"]))
    assert "hml does not beat its null control one-row." in told
    assert "hml is not shown to beat its null control random-slots." in told


def test_controls_at_a_rate_that_is_not_the_best_any_more_are_left_out():
    faster = [result("hml", [0.9], seed=seed, rate=1e-2) for seed in (0, 1)]
    assert controls_table(found([*HML, *faster, *NULL], arms=["hml"])).rows == []


@pytest.mark.parametrize(
    ("rises", "interval", "words"),
    [
        ([0.5, 0.5], "± 0.0000", "its addresses matter"),
        ([0.5, 0.25], "± 1.5883", "its addresses are not shown to matter"),
        ([0.0, 0.0], "± 0.0000", "its addresses do not matter"),
        ([-0.25], "", "its addresses do not matter"),
        ([0.5], "", "one seed"),
    ],
    ids=str,
)
def test_shuffled_addresses_are_told_by_what_the_loss_rises(rises, interval, words):
    # What the run measured itself, in the precision of training, is no part of it.
    runs = [
        result("hml", [0.75], seed=seed, shuffled={DOMAIN: 2.5 + rise, RETENTION: 9.0}, unshuffled={DOMAIN: 2.5, RETENTION: 2.0})
        for seed, rise in enumerate(rises)
    ]  # fmt: skip
    one = found(runs, arms=["hml"])
    mean = sum(rises) / len(rises)
    (row,) = controls_table(one).rows
    assert row == ["hml", "shuffled-addresses", f"{mean:+.4f}", interval, str(len(rises)), words]
    assert as_json(one, [])["arms"][0]["controls"]["shuffled-addresses"]["verdict"] == words


def test_earlier_results_of_shuffled_addresses_are_held_against_the_run_s_own_end():
    runs = [result("hml", [0.5], shuffled={DOMAIN: 2.75, RETENTION: 2.0})]
    assert rows_of(controls_table(found(runs, arms=["hml"])))["hml"]["nats lower than the control"] == "+0.2500"


@pytest.mark.parametrize(
    ("starts", "told"),
    [([None, None], ""), ([True, True], "yes"), ([False, False], "no"), ([True, False], "no"), ([True, None], "no")],
    ids=str,
)
def test_whether_an_arm_starts_at_the_base_is_told(starts, told):
    runs = [result("hml", [0.5], seed=seed, starts_at_base=one) for seed, one in enumerate(starts)]
    assert rows_of(arms_table(found(runs, arms=["hml"])))["hml"]["starts at base"] == told


def test_of_three_arms_the_second_is_the_one_that_follows():
    told = sentences(found([*HML, *FULL, result("moc", [0.125])], arms=("hml", "full", "moc")))
    assert "full ends with the lowest loss of the domain, 1.7500 ± 0.3536 nats per token; hml follows" in told[0]
    told = sentences(found([*HML, *FULL, result("moc", [0.5], [0.75])], arms=("hml", "full", "moc")))
    assert any(sentence.startswith("When 0.5000 nats are learned, as 3 of 3 arms did, hml has") for sentence in told)


def test_a_task_that_was_asked_on_one_side_alone_is_not_told():
    tasks = TaskOptions(names=["piqa", "mmlu"])
    runs = [result("hml", [0.5], tasks_before={"mmlu": {"acc": 0.5}}, tasks={"piqa": {"acc": 0.5}})]
    row = rows_of(arms_table(found(runs, arms=["hml"], tasks=tasks)))["hml"]
    assert (row["piqa"], row["mmlu"]) == ("", "")


def test_of_fine_tuned_models_losses_and_tasks_are_told_by_a_hand_s_numbers():
    tasks = TaskOptions(names=["piqa", "mmlu"])
    metrics = [{"piqa": {"acc": 0.0}, "mmlu": {"acc": 0.5}}, {"piqa": {"acc": 0.5}}]
    runs = [
        result("hml", [0.5], seed=seed, tuned=Measured({DOMAIN: 2.0 + seed, RETENTION: 1.0}, metrics[seed]))
        for seed in (0, 1)
    ]
    rows = rows_of(tuned_table(found([*runs, *FULL], arms=["hml", "full"], tasks=tasks)))
    spread_of = f"{1 / math.sqrt(2):.4f}"
    assert rows == {
        "hml": {
            "arm": "hml", "rate": "0.001", DOMAIN: f"2.5000 ± {spread_of}", RETENTION: "1.0000 ± 0.0000",
            "piqa": "0.250 ± 0.354", "mmlu": "",
        }
    }  # fmt: skip


def test_tasks_are_told_before_and_after():
    tasks = TaskOptions(names=["piqa", "mmlu"])
    given = {
        "tasks_before": {"piqa": {"acc": 0.25, "acc_norm": 0.5}},
        "tasks": {"piqa": {"acc": 0.5, "acc_norm": 0.75}},
    }
    one = found(
        [result("hml", [0.5], seed=0, **given), result("hml", [0.5], seed=1, **given)], arms=["hml"], tasks=tasks
    )
    row = rows_of(arms_table(one))["hml"]
    assert (row["piqa"], row["mmlu"]) == ("0.500 → 0.750 ± 0.000", "")


@pytest.mark.parametrize(
    ("metrics", "told"),
    [({"acc": 0.5, "acc_norm": 0.25}, 0.25), ({"acc": 0.5}, 0.5), ({"exact_match": 1.0}, 1.0), ({"ter": 3.0}, None), ({}, None)],
    ids=str,
)  # fmt: skip
def test_which_metric_of_a_task_is_told(metrics, told):
    assert metric_of(metrics) == told


def test_arms_without_results_and_failures_are_told():
    one = found(HML, failures={"full/0.001/seed-0": "midus-train | failed"}, missing=2)
    assert list(rows_of(arms_table(one))) == ["base", "hml"]
    (failed,) = [table for table in tables(one) if table.title == "Failed"]
    assert failed.rows == [["full/0.001/seed-0", "midus-train | failed"]]
    assert r"| full/0.001/seed-0 | midus-train \| failed |" in as_markdown(failed)
    assert "2 runs are not done, of which 1 failed." in sentences(one)
    told = as_json(one, [])
    assert told["failed"] == {"full/0.001/seed-0": "midus-train | failed"} and told["missing"] == 2


@pytest.mark.parametrize(
    ("failures", "missing", "words"),
    [({}, 1, "1 run is not done."), ({}, 3, "3 runs are not done."), ({"a": "b"}, 1, "1 run is not done; it failed.")],
    ids=["one", "three", "one failed"],
)
def test_what_is_not_done_is_told_in_words(failures, missing, words):
    assert words in sentences(found(HML, failures=failures, missing=missing))


def test_where_no_run_is_done_the_report_says_so(tmp_path):
    one = found([], missing=6)
    assert sentences(one) == ["No run is done yet."]
    assert list(rows_of(arms_table(one))) == ["base"]
    assert [path.name for path in write_report(tmp_path, one, [])] == ["report.md", "runs.csv"]
    told = as_json(one, [])
    assert (told["arms"], told["common_learning"], told["base"]["losses"]) == ([], None, {DOMAIN: 3.0, RETENTION: 2.0})


def test_json_has_the_numbers_of_the_tables():
    told = as_json(found([*HML, *FULL, *FULL_SLOW, *NULL]), [])
    hml, full = told["arms"]
    distance = pytest.approx(0.25 / math.sqrt(2))
    assert hml["domain_loss"] == {"mean": 2.375, "deviation": distance, "count": 2}
    assert hml["learned"] == {"mean": 0.625, "deviation": distance, "count": 2} and hml["seeds"] == [0, 1]
    assert hml["forgotten_at_equal_learning"]["mean"] == 0.15625
    assert full["forgotten_at_equal_learning"]["mean"] == 0.25 and full["rate"] == "0.001"
    assert told["common_learning"] == 0.5
    assert told["cautions"] == cautions(found([*HML, *FULL, *FULL_SLOW])) and len(told["cautions"]) == 2
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_csv_has_a_row_for_each_run_and_moment(tmp_path):
    write_runs(tmp_path / "runs.csv", [BASE, HML[0], NULL[0]], [DOMAIN, RETENTION])
    with (tmp_path / "runs.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["arm"], row["step"]) for row in rows] == [
        ("base", "0"), *(("hml", str(step)) for step in range(3)), *(("hml+one-row", str(step)) for step in range(3))
    ]  # fmt: skip
    assert rows[3] == {
        "arm": "hml", "control_of": "", "control": "", "rate": "0.001", "seed": "0", "new_parameters": "0",
        "trained_parameters": "1000", "step": "2", "tokens": "200", "seconds": "2.0", f"loss_{DOMAIN}": "2.5",
        f"loss_{RETENTION}": "2.125",
    }  # fmt: skip
    assert (rows[0]["new_parameters"], rows[0]["trained_parameters"], rows[0]["rate"]) == ("0", "0", "recipe")
    assert (rows[4]["control_of"], rows[4]["control"], rows[1]["seconds"]) == ("hml", "one-row", "")


def test_the_page_needs_no_other_file_and_says_what_the_tables_say(tmp_path):
    pytest.importorskip("matplotlib")
    one = found([*HML, *FULL, *FULL_SLOW, *NULL], arms=["hml", "full"], failures={"a<b": "1 & 2"}, missing=1)
    files = write_report(tmp_path, one, [*HML, *FULL, *FULL_SLOW, *NULL])
    assert [path.name for path in files] == ["report.md", "runs.csv", "report.html"]
    page, markdown = files[2].read_text(), files[0].read_text()
    assert page.count("data:image/png;base64,") == 4
    assert not re.findall(r"(?:src|href)=(?!\"data:)|@import|url\(|<script", page)
    assert "a&lt;b" in page and "1 &amp; 2" in page and "a<b" not in page
    for table in tables(one):
        assert f"**{table.title}**" in markdown
        for row in table.rows[1:]:
            assert f"| {' | '.join(row)} |" in markdown
            assert (
                "<tr>" + "".join(f"<td>{word}</td>" for word in row).replace("&", "&amp;") + "</tr>" in page
                or "a<b" in row
            )
    for sentence in sentences(one):
        assert f"- {sentence}" in markdown
    assert markdown.startswith("# hml, full on base\n")


def test_without_matplotlib_there_is_no_page(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert [path.name for path in write_report(tmp_path, found(HML), HML)] == ["report.md", "runs.csv"]


CURVES = {
    "several seeds": ([*HML, *FULL, *FULL_SLOW], {}),
    "one seed": ([HML[0], FULL[0]], {}),
    "no text outside": ([*HML, *FULL], {"retention": {}}),
    "curves of different lengths": (
        [result("hml", [0.1, 0.2, 0.3]), result("hml", [0.1], seed=1), result("full", [0.5])],
        {},
    ),
    "a start elsewhere": (
        [
            result("hml", [0.1]),
            result("full", [4.0, 4.5], [-1, -0.5], loss=7.0, new_parameters=5, starts_at_base=False),
        ],
        {},
    ),
    "the start alone": ([result("hml", []), result("full", [])], {}),
    "eleven arms": ([result(f"arm-{number}", [0.1]) for number in range(11)], {}),
}


@pytest.mark.parametrize("curves", CURVES)
def test_pictures_are_drawn_of_whatever_there_is(tmp_path, curves):
    pytest.importorskip("matplotlib")
    from midus_workbench.report.pictures import pictures

    results, changes = CURVES[curves]
    arms = list(dict.fromkeys(one.arm for one in results))
    drawn = pictures(found(results, arms=arms, **changes))
    expected = ["Learning against forgetting", "Loss of the domain by tokens", "Loss outside the domain by tokens"]
    expected = [expected[1]] if "retention" in changes else expected
    assert list(drawn) == [*expected, "Parameters, memory and time"]
    assert all(picture.startswith(b"\x89PNG") for picture in drawn.values())
    assert len(set(drawn.values())) == len(drawn)


@pytest.mark.parametrize(
    ("number", "told"),
    [(0, "0"), (999, "999"), (1000, "1k"), (47584, "47.6k"), (999_499, "999k"), (999_500, "1M"), (8_890_000, "8.89M")]
    + [(999_999_999, "1B"), (1_240_000_000, "1.24B"), (70_600_000_000, "70.6B")],
)
def test_parameters_are_counted_in_short(number, told):
    assert short_count(number) == told


def test_a_spread_is_told_behind_its_mean():
    one = found([*HML, *FULL])
    assert with_spread(one.arms["hml"].learned, "{:+.2f}") == "+0.62 ± 0.18"
    assert with_spread(None) == ""


def test_a_run_that_took_no_time_has_no_speed():
    (_, row) = arms_table(found([result("hml", [0.5], seconds=0.0)], arms=["hml"])).rows
    assert row[arms_table(found(HML)).head.index("tokens/s")] == ""
