"""What is told of variants: tables and sentences, from results whose numbers are known."""

import dataclasses
import math

import pytest
from compare.made_results import (
    DOMAIN,
    FULL,
    FULL_SLOW,
    HML,
    NULL,
    RETENTION,
    between,
    comparison,
    found,
    result,
    rows_of,
)

from midus_hf.compare.options import TaskOptions
from midus_hf.compare.report.findings import findings, metric_of
from midus_hf.compare.report.sentences import sentences
from midus_hf.compare.report.tables import (
    as_json,
    controls_table,
    short_table,
    tables,
    tuned_table,
    variants_table,
)
from midus_hf.compare.results import Measured, Point, Result


def test_the_table_of_variants_has_the_numbers_that_a_hand_computes():
    rows = rows_of(variants_table(found([*HML, *FULL, *FULL_SLOW])))
    # 3 - 0.5 and 3 - 0.75: 2.5 and 2.25; the sample deviation of two numbers is their distance by the root of 2.
    assert list(rows) == ["base", "full", "hml"]
    distance = 0.25 / math.sqrt(2)
    assert rows["hml"] == {
        "variant": "hml",
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
    assert {key for key, value in rows["base"].items() if value} == {"variant", "domain loss", RETENTION}


def test_of_one_seed_there_is_no_spread():
    one = found([HML[0], FULL[0]])
    rows = rows_of(variants_table(one))
    assert (rows["hml"]["domain loss"], rows["hml"]["learned"], rows["hml"]["forgotten"]) == (
        "2.5000",
        "+0.5000",
        "+0.1250",
    )
    assert "One seed: nothing here says how much of a difference is chance." in sentences(one)
    assert not any("One seed" in sentence for sentence in sentences(found([*HML, *FULL])))


def test_variants_of_one_seed_beside_others_are_named():
    told = sentences(found([*HML, FULL[0]]))
    assert "full has one seed: nothing says how much of a difference to others is chance." in told
    assert not any(sentence.startswith("One seed") for sentence in told)
    told = sentences(found([*HML, FULL[0], result("moc", [0.5])], variants=("hml", "full", "moc")))
    assert "full and moc have one seed: nothing says how much of a difference to others is chance." in told


def test_the_first_two_are_told_apart_by_their_seeds():
    # Of seeds 0 and 1, full ends lower by 0.5 and 0.75: 0.625 in the mean, and 12.7062 / 2 * 0.25 is half of the interval.
    told = sentences(found([*HML, *FULL]))
    assert between(told, "full ends").endswith(
        "hml follows with 2.3750 ± 0.1768. The base has 3.0000. With the same seeds these two differ by 0.6250 ± 1.5883 (95 %), "
        "which may be chance."
    )
    alike = [result("hml", [0.25], [0.25], seed=seed) for seed in (0, 1)]
    better = [result("full", [0.5], [0.0], seed=seed) for seed in (0, 1)]
    told = sentences(found([*alike, *better]))
    words = "With the same seeds these two differ by 0.2500 ± 0.0000 (95 %), which is more than chance of seeds."
    assert between(told, "full ends").endswith(words)
    assert "With the same seeds" not in " ".join(sentences(found([HML[0], FULL[0]])))


def test_unequal_tokens_are_told():
    longer = [result("full", [0.5, 0.6, 0.7], seed=seed) for seed in (0, 1)]
    assert "Variants were not trained on equally many tokens: hml on 200, full on 300." in sentences(
        found([*HML, *longer])
    )
    assert not any("tokens:" in sentence for sentence in sentences(found([*HML, *FULL])))


def test_how_many_rates_variants_were_tried_at_and_which_was_the_last_is_told():
    told = sentences(found([*HML, *FULL, *FULL_SLOW]))
    assert (
        "Variants were not tried at equally many rates, and more rates are more chances to end low: hml at 1, full at 2."
        in told
    )
    assert "At the lowest or highest rate that was tried, and perhaps better beyond it: full (0.001)." in told
    fast = [result("full", [0.1], seed=seed, rate=1e-2) for seed in (0, 1)]
    told = sentences(found([*FULL, *FULL_SLOW, *fast], variants=["full"]))
    assert not any("perhaps better" in sentence or "as many rates" in sentence for sentence in told)


def test_each_number_of_a_rate_has_ends_of_its_own():
    def run(learned, **rate):
        return dataclasses.replace(result("hml", [learned]), rate=rate)

    runs = [run(0.5, learning_rate=2.0, value_learning_rate=1.0)]
    runs += [run(0.1, learning_rate=rate, value_learning_rate=1.0) for rate in (1.0, 3.0)]
    assert not found(runs, variants=["hml"]).variants["hml"].is_at_an_end_of_its_rates
    higher = run(0.1, learning_rate=2.0, value_learning_rate=3.0)
    assert found([*runs, higher], variants=["hml"]).variants["hml"].is_at_an_end_of_its_rates
    assert (
        not found([*runs, run(0.1, memory_learning_rate=9.0)], variants=["hml"])
        .variants["hml"]
        .is_at_an_end_of_its_rates
    )


def test_what_does_not_start_at_the_base_is_counted_from_it_and_named():
    start = {"loss": 7.0, "kept": 3.0, "starts_at_base": False, "upscaled": {DOMAIN: 7.0, RETENTION: 3.0}}
    solar = [result("solar", [4.0, 4.25], [-1.0, -0.5], seed=seed, **start) for seed in (0, 1)]
    one = found([*HML, *solar], variants=["hml", "solar"])
    row = rows_of(variants_table(one))["solar"]
    assert (row["domain loss"], row["learned"], row["forgotten"]) == (
        "2.7500 ± 0.0000", "+0.2500 ± 0.0000", "+0.5000 ± 0.0000",
    )  # fmt: skip
    told = sentences(one)
    assert any(sentence.startswith("solar was not seen to start at the base: what was learned") for sentence in told)
    assert not any("not seen to start" in sentence for sentence in sentences(found([*HML, *FULL])))


def test_variants_that_are_not_causal_are_named():
    because = "A model that reads tokens before it predicts them has losses that cannot be compared."
    ahead = [result("full", [0.5], is_causal=False)]
    assert f"Not causal: full. {because}" in sentences(found([*HML, *ahead]))
    both = found([result("hml", [0.5], is_causal=False), *ahead])
    assert f"Not causal: hml, full. {because}" in sentences(both)
    assert not any("causal" in sentence for sentence in sentences(found([*HML, *FULL])))


def test_the_short_table_is_the_same_in_fewer_columns():
    one = found([*HML, *FULL])
    short, long = rows_of(short_table(one)), rows_of(variants_table(one))
    for name, row in short.items():
        assert row == {key: long[name][key] for key in row}


def test_several_texts_count_alike():
    texts = {"domain": {DOMAIN: "a", "roses": "b"}}
    curve = [
        Point(0, 0, None, {DOMAIN: 3.0, "roses": 1.0, RETENTION: 2.0}),
        Point(1, 9, 1.0, {DOMAIN: 1.0, "roses": 2.0, RETENTION: 5.0}),
    ]
    one = findings(
        comparison(["a"], **texts),
        Result("base", {}, 0, curve[:1]),
        [Result("a", {}, 0, curve, tokens=9, seconds=3.0)],
        {},
    )
    row = rows_of(variants_table(one))["a"]
    assert (row["domain loss"], row["learned"], row["forgotten"], row["rate"]) == (
        "1.5000",
        "+0.5000",
        "+3.0000",
        "recipe",
    )
    assert row["tokens/s"] == "3"


@pytest.mark.parametrize(
    ("starts", "told"),
    [([None, None], ""), ([True, True], "yes"), ([False, False], "no"), ([True, False], "no"), ([True, None], "no")],
    ids=str,
)
def test_whether_a_variant_starts_at_the_base_is_told(starts, told):
    runs = [result("hml", [0.5], seed=seed, starts_at_base=one) for seed, one in enumerate(starts)]
    assert rows_of(variants_table(found(runs, variants=["hml"])))["hml"]["starts at base"] == told


def test_of_three_variants_the_second_is_the_one_that_follows():
    told = sentences(found([*HML, *FULL, result("moc", [0.125])], variants=("hml", "full", "moc")))
    assert "full ends with the lowest loss of the domain, 1.7500 ± 0.3536 nats per token; hml follows" in told[0]


def test_variants_stand_beside_their_null_controls():
    one = found([*HML, *FULL, *NULL], variants=["hml", "full"])
    # Lower by 0.25 with both seeds: the interval has no width.
    assert rows_of(controls_table(one)) == {
        "hml": {
            "variant": "hml", "null control": "one-row", "nats lower than the null control": "+0.2500", "95 % interval": "± 0.0000",
            "seeds": "2", "": "beats it",
        }
    }  # fmt: skip
    told = as_json(one, [])["variants"][0]["controls"]
    assert told == {"one-row": {"mean": 0.25, "deviation": 0.0, "count": 2, "verdict": "beats it"}}
    assert "hml+one-row" not in rows_of(variants_table(one))
    assert not any("null control" in sentence for sentence in sentences(one))


def test_a_control_that_is_not_beaten_is_told():
    better = [result("hml+one-row", [0.9], seed=seed, control="one-row", control_of="hml") for seed in (0, 1)]
    wide = [
        result("hml+random-slots", [learned], seed=seed, control="random-slots", control_of="hml")
        for seed, learned in ((0, 0.5), (1, 0.1))
    ]
    told = sentences(found([*HML, *better, *wide], variants=["hml"]))
    assert "hml does not beat its null control one-row." in told
    assert "hml is not shown to beat its null control random-slots." in told


def test_controls_at_a_rate_that_is_not_the_best_any_more_are_left_out():
    faster = [result("hml", [0.9], seed=seed, rate=1e-2) for seed in (0, 1)]
    assert controls_table(found([*HML, *faster, *NULL], variants=["hml"])).rows == []


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
        result("hml", [0.75], seed=seed, shuffled={DOMAIN: 2.5 + rise, RETENTION: 9.0}, saved={DOMAIN: 2.5, RETENTION: 2.0})
        for seed, rise in enumerate(rises)
    ]  # fmt: skip
    one = found(runs, variants=["hml"])
    mean = sum(rises) / len(rises)
    (row,) = controls_table(one).rows
    assert row == ["hml", "shuffled-addresses", f"{mean:+.4f}", interval, str(len(rises)), words]
    assert as_json(one, [])["variants"][0]["controls"]["shuffled-addresses"]["verdict"] == words


def test_without_texts_outside_nothing_is_said_of_forgetting():
    one = found([*HML, *FULL], retention={})
    for table in tables(one):
        assert "forgotten" not in table.head and RETENTION not in table.head and "Forgotten" not in table.title
    assert len(variants_table(one).rows[0]) == len(variants_table(one).head)
    assert not any("forgot" in sentence for sentence in sentences(one))
    told = as_json(one, [])
    assert [variant["forgotten"] for variant in told["variants"]] == [None, None]


def test_a_task_that_was_asked_on_one_side_alone_is_not_told():
    tasks = TaskOptions(names=["piqa", "mmlu"])
    runs = [result("hml", [0.5], tasks_before={"mmlu": {"acc": 0.5}}, tasks={"piqa": {"acc": 0.5}})]
    row = rows_of(variants_table(found(runs, variants=["hml"], tasks=tasks)))["hml"]
    assert (row["piqa"], row["mmlu"]) == ("", "")


def test_of_fine_tuned_models_losses_and_tasks_are_told_by_a_hand_s_numbers():
    tasks = TaskOptions(names=["piqa", "mmlu"])
    metrics = [{"piqa": {"acc": 0.0}, "mmlu": {"acc": 0.5}}, {"piqa": {"acc": 0.5}}]
    runs = [
        result("hml", [0.5], seed=seed, tuned=Measured({DOMAIN: 2.0 + seed, RETENTION: 1.0}, metrics[seed]))
        for seed in (0, 1)
    ]
    rows = rows_of(tuned_table(found([*runs, *FULL], variants=["hml", "full"], tasks=tasks)))
    spread_of = f"{1 / math.sqrt(2):.4f}"
    assert rows == {
        "hml": {
            "variant": "hml", "rate": "0.001", DOMAIN: f"2.5000 ± {spread_of}", RETENTION: "1.0000 ± 0.0000",
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
        [result("hml", [0.5], seed=0, **given), result("hml", [0.5], seed=1, **given)], variants=["hml"], tasks=tasks
    )
    row = rows_of(variants_table(one))["hml"]
    assert (row["piqa"], row["mmlu"]) == ("0.500 → 0.750 ± 0.000", "")


@pytest.mark.parametrize(
    ("metrics", "told"),
    [({"acc": 0.5, "acc_norm": 0.25}, 0.25), ({"acc": 0.5}, 0.5), ({"exact_match": 1.0}, 1.0), ({"ter": 3.0}, None), ({}, None)],
    ids=str,
)  # fmt: skip
def test_which_metric_of_a_task_is_told(metrics, told):
    assert metric_of(metrics) == told
