"""Findings in results whose numbers are known: spreads, rates, learned and forgotten, null controls, cautions, advice."""

import dataclasses
import math

import pytest
from compare.fake_results import BASE, DOMAIN, FULL, HML, NULL, RETENTION, SOLAR, VALIDATION, comparison, found, result

from midus_hf.compare.report import Spread, advice, cautions, findings, loss_decreases, spread, verdict
from midus_hf.compare.run import chosen_rate


@pytest.mark.parametrize(
    ("count", "quantile"),
    [(2, 12.7062), (3, 4.3027), (4, 3.1824), (5, 2.7764), (6, 2.5706), (10, 2.2622), (11, 2.2281), (31, 2.2281)],
)
def test_interval_of_a_mean_is_by_students_distribution(count, quantile):
    """More seeds than the table has take its last quantile, which makes intervals wider."""
    half = Spread(0.0, 2.0, count).half_interval
    assert half == pytest.approx(2.0 * quantile / math.sqrt(count), rel=5e-4)
    assert verdict(Spread(half, 2.0, count)) == "is not shown to beat it", "it reaches zero"
    assert verdict(Spread(half + 1e-9, 2.0, count)) == "beats it"


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([0.5, 0.51, 0.49], "beats it"),
        ([0.5, 0.0, 0.1], "is not shown to beat it"),
        ([0.5], "one seed"),
        ([-0.5], "does not beat it"),
        ([0.0], "does not beat it"),
        ([0.0, -0.05], "does not beat it"),
    ],
    ids=str,
)
def test_control_is_beaten_if_the_interval_is_above_zero(numbers, words):
    assert verdict(spread(numbers)) == words


def with_loss(run, loss: float):
    """Return a run whose loss of the validation text ended at a value."""
    end = dataclasses.replace(run.curve[-1], losses={**run.losses, VALIDATION: loss})
    return dataclasses.replace(run, curve=[*run.curve[:-1], end])


def test_rate_is_chosen_by_validation_losses_of_the_first_seed():
    # The loss of the domain is lower at the first rate, that of the validation text at the second.
    runs = [with_loss(result("a", [0.9]), 3.5), with_loss(result("a", [0.3], rate=1e-2), 3.25)]
    assert chosen_rate(runs, [VALIDATION]) == {"learning_rate": 1e-2}
    # Of rates that are as good the first counts, and a single one needs no text.
    runs = [result("a", [0.3], rate=rate) for rate in (1e-2, 1e-3)]
    assert chosen_rate(runs, [VALIDATION]) == chosen_rate(runs[:1], []) == {"learning_rate": 1e-2}
    assert chosen_rate([], [VALIDATION]) is None
    # With seed 1 alone the slow rate would be better.
    slow = [result("full", [0.5], rate=1e-4), result("full", [9.0], seed=1, rate=1e-4)]
    assert found([*FULL, *slow], variants=["full"]).variants[0].rate == "0.001"


def test_recovery_to_base_is_not_learning():
    one = found([*HML, *SOLAR], variants=["hml", "solar"])
    decreases = [loss_decreases(SOLAR[0], BASE, [text]) for text in (DOMAIN, RETENTION)]
    assert decreases == [[-4.0, 0.0, 0.25], [-1.0, 0.0, -0.5]]
    (solar,) = [variant for variant in one.variants if variant.name == "solar"]
    assert solar.learned_by_seed == {0: 0.25, 1: 0.25} and solar.forgotten_by_seed == {0: 0.5, 1: 0.5}


def test_several_texts_count_alike():
    losses = [{DOMAIN: 3.0, "roses": 1.0, RETENTION: 2.0}, {DOMAIN: 1.0, "roses": 2.0, RETENTION: 5.0}]
    curve = [dataclasses.replace(BASE.curve[0], losses=one) for one in losses]
    run = dataclasses.replace(result("a", [0.0]), curve=curve)
    one = findings(comparison(["a"], domain={DOMAIN: "a", "roses": "b"}, validation={}), BASE, [run], {})
    (variant,) = one.variants
    assert (variant.domain_loss.mean, variant.learned.mean, variant.forgotten.mean) == (1.5, 0.5, 3.0)


def test_controls_at_other_rates_or_seeds_are_left_out():
    (hml,) = found([*HML, *NULL], variants=["hml"]).variants
    assert hml.advantages == {"one-row": Spread(0.25, 0.0, 2)}
    faster = [result("hml", [0.9], seed=seed, rate=1e-2) for seed in (0, 1)]  # its first seed chooses it
    assert found([*HML, *faster, *NULL], variants=["hml"]).variants[0].advantages == {}
    others = [dataclasses.replace(one, seed=one.seed + 5) for one in NULL]
    assert found([*HML, *others], variants=["hml"]).variants[0].advantages == {}


def test_shuffled_addresses_count_from_the_saved_model():
    runs = [
        result("hml", [0.75], seed=seed, shuffled={DOMAIN: 2.5 + rise, RETENTION: 9.0}, saved={DOMAIN: 2.5, RETENTION: 2.0})
        for seed, rise in enumerate([0.5, 0.25])
    ]  # fmt: skip
    (hml,) = found(runs, variants=["hml"]).variants
    assert hml.advantages == {"shuffled-addresses": spread([0.5, 0.25])}


SEEDS = (0, 1, 2)
# What the first seed ended at with the two rates that are not chosen.
HML_ELSE, FULL_ELSE = ([result(name, [0.0, 0.1], rate=rate) for rate in (1e-2, 1e-4)] for name in ("hml", "full"))
HML_3 = [*(result("hml", [0.25, 0.5], seed=seed) for seed in SEEDS), *HML_ELSE]
FULL_3 = [*(result("full", [0.5, 1.0], [0.0, 0.25], seed=seed) for seed in SEEDS), *FULL_ELSE]
CAUTIONS = {
    "nothing": ([*HML_3, *FULL_3], []),
    "two seeds": ([*HML, *HML_ELSE, *FULL_3], ["Fewer than three seeds: hml 2."]),
    "not causal": (
        [*(dataclasses.replace(one, is_causal=False) for one in HML_3), *FULL_3],
        ["Not causal, so losses cannot be compared: hml."],
    ),
    "an end of the rates": (
        [*HML_3, *(result("full", [1.0, 1.0], seed=seed, rate=1e-4) for seed in SEEDS), *FULL_3[:1], *FULL_ELSE[:1]],
        ["Best rate at an end of its list: full 0.0001."],
    ),
}


@pytest.mark.parametrize(("results", "expected"), CAUTIONS.values(), ids=CAUTIONS)
def test_cautions_name_the_variants_concerned(results, expected):
    assert cautions(found(results)) == expected


def test_cautions_count_runs_that_are_not_done():
    assert cautions(found([*HML_3, *FULL_3], missing=2)) == ["Runs that are not done: 2."]
    failed = found([*HML_3, *FULL_3], missing=2, failures={"hml/0.01/seed-0": "no memory"})
    assert cautions(failed) == ["Failed: hml/0.01/seed-0: no memory.", "Runs that are not done: 2."]


def seeds(variant: str, learned, forgotten=0.0, parameters=1000, **changes) -> list:
    """Return runs of three seeds that learn and forget this much, or as lists say."""
    runs = zip(*(each if isinstance(each, list) else [each] * 3 for each in (learned, forgotten)), strict=True)
    return [
        result(variant, [one], [other], seed=seed, trained_parameters=parameters, **changes)
        for seed, (one, other) in enumerate(runs)
    ]


A, B = seeds("a", 0.5, 0.25), seeds("b", 0.25, 0.125)
BEST_A = "At equal parameters (1,000), take a: it learned most of 2, 0.5000 nats per token."
LEAST_B = "Forgets least: b, +0.1250 nats per token, and it learned 0.2500."
NO_PAIR = "At equal parameters: no two variants that learned have as many (within 10 %)."
ONLY_A = "Forgets least: a, +0.2500 nats per token, and it learned 0.5000."
ENOUGH = "Too few seeds to tell: nothing of the above."
ADVICE = {
    "clear": ([*A, *B], [BEST_A, LEAST_B, ENOUGH]),
    "within a tenth": ([*A, *seeds("b", 0.25, 0.125, 1100)], [BEST_A, LEAST_B, ENOUGH]),
    "unequal parameters": ([*A, *seeds("b", 0.25, 0.125, 1120)], [NO_PAIR, LEAST_B, ENOUGH]),
    "the larger group": (
        [*seeds("c", 2.0, 1.0, 10**6), *A, *B],
        [BEST_A, LEAST_B, ENOUGH],
    ),
    "overlapping": (
        [*A, *seeds("b", [0.0, 0.5, 0.25], [0.5, 0.0, -0.125])],
        [
            BEST_A,
            LEAST_B,
            "Too few seeds to tell whether a learned more than b; b forgot less than a.",
        ],
    ),
    "one seed": (
        [A[0], B[0]],
        [BEST_A, LEAST_B, "Too few seeds to tell whether a learned more than b; b forgot less than a."],
    ),
    "not causal": ([*seeds("a", 0.5, is_causal=False), *B], [NO_PAIR, LEAST_B, ENOUGH]),
    "nothing learned": ([*A, *seeds("b", -0.25)], [NO_PAIR, ONLY_A, ENOUGH]),
    "null controls": (
        [*A, *seeds("a+one-row", [0.5, 0.0, 0.5], control="one-row", control_of="a")]
        + [*seeds("a+random-slots", 0.25, control="random-slots", control_of="a")],
        [NO_PAIR, ONLY_A, "Too few seeds to tell whether a beats one-row."],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("results", "expected"), ADVICE.values(), ids=ADVICE)
def test_advice_follows_from_the_numbers(results, expected):
    variants = list(dict.fromkeys(one.variant for one in results if one.control is None))
    assert advice(found(results, variants=variants, validation={})) == expected


def test_advice_without_retention_texts_says_so():
    sentence = "Forgets least: no variant that learned was measured on text outside the domain."
    assert advice(found([*A, *B], variants="ab", validation={}, retention={})) == [BEST_A, sentence, ENOUGH]
