"""What to doubt: each reason why variants differ in more than their methods, and where a row has its mark."""

import dataclasses
import math

import pytest
from compare.made_results import BASE, DOMAIN, HML, RETENTION, VALIDATION, comparison, found, result, rows_of

from midus_hf.compare.doubts import doubts, shared_origin
from midus_hf.compare.findings import findings
from midus_hf.compare.options import VariantOptions
from midus_hf.compare.report import as_json, doubts_table, variants_table

SEEDS = (0, 1, 2)
HML_3 = [result("hml", [0.25, 0.5], seed=seed) for seed in SEEDS]
FULL_3 = [result("full", [0.5, 1.0], seed=seed) for seed in SEEDS]
SLOW = result("full", [0.25, 0.5], rate=1e-4)
SOLAR = {"loss": 7.0, "kept": 3.0, "starts_at_base": False, "upscaled": {DOMAIN: 7.0, RETENTION: 3.0, VALIDATION: 8.0}}
CASES = {
    "nothing": ([*HML_3, *FULL_3], []),
    "two seeds": ([*HML, *FULL_3], ["Fewer than three seeds, which say little of chance: hml with 2."]),
    "tokens": (
        [*HML_3, *(result("full", [0.5, 0.6, 0.7], seed=seed) for seed in SEEDS)],
        ["Trained on unequal numbers of tokens: full on 300, hml on 200."],
    ),
    "rates": (
        [*HML_3, *FULL_3, SLOW],
        ["Tried at unequal numbers of rates, and more rates are more chances to end low: full at 2, hml at 1."],
    ),
    "a start elsewhere": (
        [*HML_3, *(result("full", [4.0, 4.25], [-1.0, -0.5], seed=seed, **SOLAR) for seed in SEEDS)],
        ["Not seen to start at the base, from which learned and forgotten are counted all the same: full."],
    ),
    "other readings": (
        [*HML_3, *(dataclasses.replace(one, request={"train": {"document_mask": True}}) for one in FULL_3)],
        [
            "Read texts or compute in different ways, so that losses are not of the same predictions: full with "
            "document_mask=True, hml by default."
        ],
    ),
    "not causal": (
        [*(dataclasses.replace(one, is_causal=False) for one in HML_3), *FULL_3],
        ["Not causal, so that losses cannot be compared, since tokens are read before they are predicted: hml."],
    ),
    "sizes": (
        [*HML_3, *(dataclasses.replace(one, trained_parameters=1300) for one in FULL_3)],
        [
            "Trains a number of parameters that is more than 10 % off the median of those that do not train all: "
            "full 1,300 of 1,150, hml 1,000 of 1,150."
        ],
    ),
    "sizes within a tenth": ([*HML_3, *(dataclasses.replace(one, trained_parameters=1100) for one in FULL_3)], []),
    "all parameters": (
        [
            *HML_3,
            *(
                dataclasses.replace(one, trained_parameters=10**9, request={"train": {"trainable": "all"}})
                for one in FULL_3
            ),
        ],
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_why_variants_cannot_be_compared_is_told(case):
    results, expected = CASES[case]
    one = found(results)
    assert [doubt.sentence for doubt in doubts(one)] == expected
    assert [doubt["reason"] for doubt in as_json(one, [])["doubts"]] == [words.split(":")[0] for words in expected]


def with_rates(rates, results):
    """Return the findings about one variant that is tried at these rates."""
    variants = {"full": VariantOptions(rates=rates)}
    return findings(dataclasses.replace(comparison(["full"]), variants=variants), BASE, results, {})


@pytest.mark.parametrize(
    ("best", "words"),
    [
        (0.001, "full at 0.001 (add 0.003)"),
        (0.0001, "full at 0.0001 (add 3.33e-05)"),
        (0.0003, None),
    ],
)
def test_a_best_rate_at_an_end_of_the_list_is_told_with_the_rate_to_add(best, words):
    rates = [1e-3, 3e-4, 1e-4]
    results = [result("full", [0.9 if rate == best else 0.5], rate=rate) for rate in rates]
    results += [result("full", [0.9], rate=best, seed=seed) for seed in (1, 2)]
    sentences = [doubt.sentence for doubt in doubts(with_rates(rates, results))]
    beginning = "The best rate is an end of the list, so that a better one may lie beyond: "
    assert sentences == ([] if words is None else [f"{beginning}{words}."])


def test_each_key_of_a_rate_that_was_searched_has_ends():
    rates = [{"learning_rate": 1e-3, "value_learning_rate": value} for value in (1e-2, 3e-2)]
    runs = [
        dataclasses.replace(result("full", [learned]), rate=rate)
        for learned, rate in zip((0.5, 0.9), rates, strict=True)
    ]
    (doubt,) = [doubt for doubt in doubts(with_rates(rates, runs)) if "end of the list" in doubt.reason]
    assert doubt.variants == {"full": "at 0.001,value=0.03 (add 0.001,value=0.09)"}


def test_a_rate_that_failed_or_ended_at_no_number_is_named():
    diverged = result("full", [math.nan], rate=1e-2)
    results = [diverged, *FULL_3]
    (doubt,) = doubts(with_rates([1e-2, 1e-3, 3e-3], results))[-1:]
    assert doubt.sentence == (
        "Rates that are not done or ended at no finite number, and were not chosen: full at 0.01 and 0.003."
    )
    assert doubts(with_rates([1e-2, 1e-4], [])) == []  # runs that are not done are counted elsewhere
    one = with_rates([1e-2, 1e-4], [diverged])
    assert one.variants == [] and doubts(one)[-1].variants == {"full": "at 0.01 and 0.0001"}


def origin(**changes) -> dict:
    machine = {"processor": "P", "threads": 2, "torch": "2", "transformers": "5", "device": "cpu"}
    code = {"version": "1", "sources": "c" * 64, "commit": "d" * 40, "changed": True}
    return {"data": "a" * 64, "base": "b" * 64, "code": code, "machine": machine, **changes}


def made_with(**changes):
    """Return findings in which `full` was made with another origin than the base and `hml`."""
    hml = [dataclasses.replace(one, origin=origin()) for one in HML_3]
    full = [dataclasses.replace(one, origin=origin(**changes)) for one in FULL_3]
    base = dataclasses.replace(BASE, origin=origin())
    return findings(comparison(["hml", "full"]), base, [*hml, *full], {})


def test_what_all_rows_share_is_one_line():
    assert shared_origin(made_with()) == (
        "All rows were made with data aaaaaaaa; base bbbbbbbb; code 1 at dddddddd with changes (cccccccc); machine P, 2 threads, "
        "cpu, torch 2, transformers 5."
    )
    assert doubts(made_with()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "e" * 64}, "base aaaaaaaa, full eeeeeeee, hml aaaaaaaa"),
        ({"code": {"version": "2", "sources": "f" * 64}}, "full 2 (ffffffff)"),
        ({"machine": {**origin()["machine"], "threads": 1}}, "full P, 1 threads, cpu, torch 2, transformers 5"),
    ],
    ids=["data", "code", "machine"],
)
def test_rows_of_another_origin_are_doubted_and_have_a_column(changes, words):
    one, (kind,) = made_with(**changes), changes
    (doubt,) = doubts(one)
    assert doubt.reason == f"Made with different {kind}" and words in doubt.sentence
    rows = rows_of(variants_table(one))
    assert rows["full"][kind] == doubt.variants["full"] != rows["hml"][kind]
    assert f"{kind} " not in shared_origin(one)


def test_the_same_sources_at_another_commit_are_the_same_code():
    assert doubts(made_with(code={**origin()["code"], "commit": "e" * 40})) == []


def test_null_controls_of_another_origin_are_doubted():
    code = {"code": {"version": "1", "sources": "b" * 64}}
    control = result("hml+one-row", [0.25, 0.25], control="one-row", control_of="hml", origin=code)
    reasons = [doubt.reason for doubt in doubts(found([*HML_3, control], variants=["hml"]))]
    assert reasons == ["Made with different code"]


def test_rows_have_the_numbers_of_their_doubts():
    one = found([HML[0], *FULL_3, SLOW])
    assert [row[0] for row in doubts_table(one).rows] == ["1", "2"]
    rows = rows_of(variants_table(one))
    assert (rows["hml"]["doubts"], rows["full"]["doubts"], rows["base"]["doubts"]) == ("1, 2", "2", "")
