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
    VALIDATION,
    comparison,
    found,
    result,
    rows_of,
)

from midus_hf.compare.findings import findings, sentences, with_spread
from midus_hf.compare.options import TaskOptions
from midus_hf.compare.report import as_json, controls_table, differences_table, metric_of, tables, variants_table
from midus_hf.compare.results import Measured, Point, Result

BOTH = ["hml", "full"]
SOLAR = {"loss": 7.0, "kept": 3.0, "starts_at_base": False, "upscaled": {DOMAIN: 7.0, RETENTION: 3.0, VALIDATION: 8.0}}


def test_the_table_of_variants_has_the_numbers_that_a_hand_computes():
    one = found([*HML, *FULL, *FULL_SLOW])
    rows = rows_of(variants_table(one))
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
        "doubts": "1, 2",
    }
    assert rows["full"]["rate"] == "0.001" and rows["full"]["domain loss"] == f"1.7500 ± {0.5 / math.sqrt(2):.4f}"
    assert {key: value for key, value in rows["base"].items() if value} == {
        "variant": "base", "domain loss": "3.0000", RETENTION: "2.0000"
    }  # fmt: skip
    short = rows_of(variants_table(one, short=True))
    assert list(short["hml"]) == ["variant", "rate", "trains", "domain loss", "learned", "forgotten", "doubts"]
    assert all(row == {key: rows[name][key] for key in row} for name, row in short.items())


def test_what_does_not_start_at_the_base_is_counted_from_it():
    solar = [result("solar", [4.0, 4.25], [-1.0, -0.5], seed=seed, **SOLAR) for seed in (0, 1)]
    row = rows_of(variants_table(found([*HML, *solar], variants=["hml", "solar"])))["solar"]
    report = (row["domain loss"], row["learned"], row["forgotten"], row["starts at base"])
    assert report == ("2.7500 ± 0.0000", "+0.2500 ± 0.0000", "+0.5000 ± 0.0000", "no")


def test_the_first_two_are_told_apart_by_their_seeds():
    # Of seeds 0 and 1, full ends lower by 0.5 and 0.75: 0.625 in the mean, and 12.7062 / 2 * 0.25 is half of the interval.
    moc = result("moc", [0.125])
    assert sentences(found([*HML, *FULL, moc], variants=["hml", "full", "moc"]))[0] == (
        "full ends with the lowest loss of the domain, 1.7500 ± 0.3536 nats per token; hml follows with 2.3750 ± 0.1768. "
        "full began with 3.0000. With the same seeds these two differ by 0.6250 ± 1.5883 (95 %), which may be chance."
    )
    alike = [result("hml", [0.25], [0.25], seed=seed) for seed in (0, 1)]
    better = [result("full", [0.5], [0.0], seed=seed) for seed in (0, 1)]
    words = "With the same seeds these two differ by 0.2500 ± 0.0000 (95 %), which is more than chance of seeds."
    assert sentences(found([*alike, *better]))[0].endswith(words)
    assert sentences(found([HML[0], FULL[0]]))[0].endswith("hml follows with 2.5000. full began with 3.0000.")


def test_several_texts_count_alike():
    texts = {"domain": {DOMAIN: "a", "roses": "b"}, "validation": {}}
    curve = [
        Point(0, 0, None, {DOMAIN: 3.0, "roses": 1.0, RETENTION: 2.0}),
        Point(1, 9, 1.0, {DOMAIN: 1.0, "roses": 2.0, RETENTION: 5.0}),
    ]
    run = Result("a", {}, 0, curve, tokens=9, seconds=3.0)
    row = rows_of(variants_table(findings(comparison(["a"], **texts), Result("base", {}, 0, curve[:1]), [run], {})))[
        "a"
    ]
    report = [row[name] for name in ("domain loss", "learned", "forgotten", "rate", "tokens/s")]
    assert report == ["1.5000", "+0.5000", "+3.0000", "recipe", "3"]


@pytest.mark.parametrize(
    ("starts", "expected"),
    [([None, None], ""), ([True, True], "yes"), ([False, False], "no"), ([True, False], "no"), ([True, None], "no")],
    ids=str,
)
def test_whether_a_variant_starts_at_the_base_is_told(starts, expected):
    runs = [result("hml", [0.5], seed=seed, starts_at_base=one) for seed, one in enumerate(starts)]
    assert rows_of(variants_table(found(runs, variants=["hml"])))["hml"]["starts at base"] == expected


def test_variants_stand_beside_their_null_controls():
    one = found([*HML, *FULL, *NULL])
    # Lower by 0.25 with both seeds: the interval has no width.
    assert controls_table(one).rows == [["hml", "one-row", "+0.2500", "± 0.0000", "2", "beats it"]]
    report = as_json(one, [])["variants"][1]["controls"]
    assert report == {"one-row": {"mean": 0.25, "deviation": 0.0, "count": 2, "verdict": "beats it"}}
    assert "hml+one-row" not in rows_of(variants_table(one))
    assert not any("null control" in sentence for sentence in sentences(one))


def test_a_control_that_is_not_beaten_is_told():
    better = [result("hml+one-row", [0.9], seed=seed, control="one-row", control_of="hml") for seed in (0, 1)]
    wide = [
        result("hml+random-slots", [learned], seed=seed, control="random-slots", control_of="hml")
        for seed, learned in ((0, 0.5), (1, 0.1))
    ]
    text = sentences(found([*HML, *better, *wide], variants=["hml"]))
    assert "hml does not beat its null control one-row." in text
    assert "hml is not shown to beat its null control random-slots." in text


def test_controls_at_another_rate_or_with_other_seeds_are_left_out():
    faster = [result("hml", [0.9], seed=seed, rate=1e-2) for seed in (0, 1)]  # its first seed chooses it
    assert controls_table(found([*HML, *faster, *NULL], variants=["hml"])).rows == []
    others = [dataclasses.replace(one, seed=one.seed + 5) for one in NULL]
    assert controls_table(found([*HML, *others], variants=["hml"])).rows == []


@pytest.mark.parametrize(
    ("rises", "interval", "words"),
    [
        ([0.5, 0.5], "± 0.0000", "beats it"),
        ([0.5, 0.25], "± 1.5883", "is not shown to beat it"),
        ([0.0, 0.0], "± 0.0000", "does not beat it"),
        ([-0.25], "", "does not beat it"),
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
    assert controls_table(one).rows == [
        ["hml", "shuffled-addresses", f"{mean:+.4f}", interval, str(len(rises)), words]
    ]
    assert ("hml does not beat its null control shuffled-addresses." in sentences(one)) == (
        words == "does not beat it"
    )


def test_without_texts_outside_nothing_is_said_of_forgetting():
    one = found([*HML, *FULL], retention={})
    for table in tables(one):
        assert "forgotten" not in table.head and RETENTION not in table.head
    assert [variant["forgotten"] for variant in as_json(one, [])["variants"]] == [None, None]


TASKS = TaskOptions(names=["piqa", "mmlu"])


def test_tasks_are_told_before_and_after():
    metrics = {
        "tasks_before": {"piqa": {"acc": 0.25, "acc_norm": 0.5}},
        "tasks": {"piqa": {"acc": 0.5, "acc_norm": 0.75}},
    }
    one = found([result("hml", [0.5], seed=seed, **metrics) for seed in (0, 1)], variants=["hml"], tasks=TASKS)
    row = rows_of(variants_table(one))["hml"]
    assert (row["piqa"], row["mmlu"]) == ("0.500 → 0.750 ± 0.000", "")
    # On one side alone they say nothing.
    runs = [result("hml", [0.5], tasks_before={"mmlu": {"acc": 0.5}}, tasks={"piqa": {"acc": 0.5}})]
    row = rows_of(variants_table(found(runs, variants=["hml"], tasks=TASKS)))["hml"]
    assert (row["piqa"], row["mmlu"]) == ("", "")


def test_fine_tuned_models_have_a_row_of_their_own():
    metrics = [{"piqa": {"acc": 0.0}, "mmlu": {"acc": 0.5}}, {"piqa": {"acc": 0.5}}]
    runs = [
        result("hml", [0.5], seed=seed, tuned=Measured({DOMAIN: 2.0 + seed, RETENTION: 1.0}, metrics[seed]))
        for seed in (0, 1)
    ]
    rows = rows_of(variants_table(found([*runs, *FULL], tasks=TASKS)))
    assert list(rows) == ["base", "full", "hml", "hml, fine-tuned"]
    assert {key: value for key, value in rows["hml, fine-tuned"].items() if value} == {
        "variant": "hml, fine-tuned", "domain loss": f"2.5000 ± {1 / math.sqrt(2):.4f}", RETENTION: "1.0000 ± 0.0000",
        "piqa": "0.250 ± 0.354",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"acc": 0.5, "acc_norm": 0.25}, 0.25),
        ({"acc": 0.5}, 0.5),
        ({"exact_match,first-clause": 0.5, "exact_match,any": 1.0}, 0.5),
        ({"ter": 3.0}, None),
        ({}, None),
    ],
    ids=str,
)  # fmt: skip
def test_which_metric_of_a_task_is_told(metrics, expected):
    assert metric_of(metrics) == expected


def test_a_spread_is_told_behind_its_mean():
    (hml,) = found(HML, variants=["hml"]).variants
    assert with_spread(hml.learned, "{:+.2f}") == "+0.62 ± 0.18" and with_spread(None) == ""


def test_variants_are_subtracted_from_the_reference_seed_by_seed():
    # full learned 1.0 and 1.5, hml 0.5 and 0.75; full forgot 1.0 and 2.0, hml 0.125 and 0.375.
    one = found([*HML, *FULL])
    table = differences_table(one)
    deviation = f"{0.25 / math.sqrt(2):.4f}"
    assert table.title == "Difference to full, paired by seed" and table.rows == [
        ["hml", f"-0.6250 ± {deviation}", f"-1.2500 ± {0.75 / math.sqrt(2):.4f}", "0 of 2"]
    ]
    (row,) = differences_table(found([*HML, *FULL], reference="hml")).rows
    assert (row[0], row[1], row[3]) == ("full", f"+0.6250 ± {deviation}", "2 of 2")
    (row,) = differences_table(found([*HML, FULL[0]], retention={})).rows
    assert row == ["hml", "-0.5000", "0 of 1"]


def test_without_a_result_of_the_reference_nothing_is_subtracted():
    assert differences_table(found(HML, reference="full")).rows == []
    assert as_json(found(HML, reference="full"), [])["reference"] is None


def test_the_rate_of_a_variant_is_that_of_its_first_seed():
    # With seed 1 alone the slow rate would be better.
    slow = [dataclasses.replace(FULL_SLOW[0]), result("full", [9.0], seed=1, rate=1e-4)]
    assert rows_of(variants_table(found([*HML, *FULL, *slow])))["full"]["rate"] == "0.001"


def test_a_certificate_has_a_column():
    certified = [dataclasses.replace(one, certificate={"kept": 1}) for one in HML]
    rows = rows_of(variants_table(found([*certified, *FULL])))
    assert (rows["hml"]["certified"], rows["full"]["certified"]) == ("yes", "")
    assert [one["certified"] for one in as_json(found([certified[0], HML[1]], variants=["hml"]), [])["variants"]] == [
        False
    ]


def test_what_trains_all_is_marked():
    request = {"train": {"trainable": "all"}}
    everything = [dataclasses.replace(one, request=request) for one in FULL]
    assert rows_of(variants_table(found([*HML, *everything])))["full"]["trains"] == "1k, all"
