"""What is found of variants, in results whose numbers are known: spreads, rates, learned and forgotten, null controls, cautions."""

import dataclasses
import math

import pytest
from compare.made_results import BASE, DOMAIN, FULL, HML, NULL, RETENTION, SOLAR, VALIDATION, comparison, found, result

from midus_hf.compare.findings import Spread, cautions, chosen_rate, findings, shared_origin, spread, verdict
from midus_hf.compare.options import VariantOptions


@pytest.mark.parametrize(
    ("count", "quantile"),
    [(2, 12.7062), (3, 4.3027), (4, 3.1824), (5, 2.7764), (6, 2.5706), (10, 2.2622), (11, 2.2281), (31, 2.2281)],
)
def test_the_interval_of_a_mean_is_that_of_students_distribution(count, quantile):
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
def test_a_control_is_beaten_where_the_interval_of_the_advantage_lies_above_zero(numbers, words):
    assert verdict(spread(numbers)) == words


def with_loss(run, loss: float):
    """Return a run whose loss of the validation text ended at a value."""
    end = dataclasses.replace(run.curve[-1], losses={**run.losses, VALIDATION: loss})
    return dataclasses.replace(run, curve=[*run.curve[:-1], end])


def test_the_rate_is_chosen_by_the_first_seeds_losses_of_validation_texts_that_are_finite():
    # The loss of the domain is lower at the first rate, that of the validation text at the second.
    runs = [with_loss(result("a", [0.9]), 3.5), with_loss(result("a", [0.3], rate=1e-2), 3.25)]
    assert chosen_rate(runs, [VALIDATION]) == {"learning_rate": 1e-2}
    # Of rates that are as good the first counts, and a single one needs no text.
    runs = [result("a", [0.3], rate=rate) for rate in (1e-2, 1e-3)]
    assert chosen_rate(runs, [VALIDATION]) == chosen_rate(runs[:1], []) == {"learning_rate": 1e-2}
    for loss in (math.nan, math.inf):
        runs = [with_loss(result("a", [0.3], rate=1e-2), loss), result("a", [0.1])]
        assert chosen_rate(runs, [VALIDATION]) == {"learning_rate": 1e-3}
        assert chosen_rate(runs[:1], [VALIDATION]) is None and chosen_rate([], [VALIDATION]) is None
    # With seed 1 alone the slow rate would be better.
    slow = [result("full", [0.5], rate=1e-4), result("full", [9.0], seed=1, rate=1e-4)]
    assert found([*FULL, *slow], variants=["full"]).variants[0].rate == "0.001"


@pytest.mark.parametrize("results", [SOLAR, [*HML, *SOLAR]], ids=["the base's own losses", "a run's start"])
def test_to_make_up_for_a_start_below_the_base_is_neither_to_learn_nor_to_remember(results):
    one = found(results, variants=["hml", "solar"])
    assert (one.falls(SOLAR[0], [DOMAIN]), one.falls(SOLAR[0], [RETENTION])) == ([-4.0, 0.0, 0.25], [-1.0, 0.0, -0.5])
    (solar,) = [variant for variant in one.variants if variant.name == "solar"]
    assert solar.learned_by_seed == {0: 0.25, 1: 0.25} and solar.forgotten_by_seed == {0: 0.5, 1: 0.5}


def test_the_losses_of_the_base_are_those_of_a_run_that_reads_texts_as_all_do():
    apart = {"train": {"document_mask": True}}
    runs = [result("hml", [0.5], loss=3.5, request=apart), result("full", [0.5], loss=3.25)]
    assert found(runs).base_losses[DOMAIN] == 3.25 and found(runs[:1]).base_losses == BASE.losses
    assert found(runs, train={"corpus": "corpus", "max_steps": 10, **apart["train"]}).base_losses[DOMAIN] == 3.5


def test_several_texts_count_alike():
    losses = [{DOMAIN: 3.0, "roses": 1.0, RETENTION: 2.0}, {DOMAIN: 1.0, "roses": 2.0, RETENTION: 5.0}]
    curve = [dataclasses.replace(BASE.curve[0], losses=one) for one in losses]
    run = dataclasses.replace(result("a", [0.0]), curve=curve)
    one = findings(comparison(["a"], domain={DOMAIN: "a", "roses": "b"}, validation={}), BASE, [run], {})
    (variant,) = one.variants
    assert (variant.domain_loss.mean, variant.learned.mean, variant.forgotten.mean) == (1.5, 0.5, 3.0)


def test_controls_at_another_rate_or_with_other_seeds_are_left_out():
    (hml,) = found([*HML, *NULL], variants=["hml"]).variants
    assert hml.advantages == {"one-row": Spread(0.25, 0.0, 2)}
    faster = [result("hml", [0.9], seed=seed, rate=1e-2) for seed in (0, 1)]  # its first seed chooses it
    assert found([*HML, *faster, *NULL], variants=["hml"]).variants[0].advantages == {}
    others = [dataclasses.replace(one, seed=one.seed + 5) for one in NULL]
    assert found([*HML, *others], variants=["hml"]).variants[0].advantages == {}


def test_shuffled_addresses_are_told_by_what_the_loss_of_the_saved_model_rises():
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
FULL_3 = [*(result("full", [0.5, 1.0], seed=seed) for seed in SEEDS), *FULL_ELSE]
TRAINS_ALL = {"train": {"trainable": "all"}}
DOCUMENTS_APART = {"train": {"document_mask": True, "text_column": "body", "bf16": False}}
DEFAULTS = {"train": {"document_mask": False, "text_column": "text", "bf16": None, "max_steps": 10}}
CAUTIONS = {
    "nothing": ([*HML_3, *FULL_3], []),
    "two seeds": ([*HML, *HML_ELSE, *FULL_3], ["Fewer than three seeds: hml 2."]),
    "tokens": (
        [*HML_3, *(result("full", [0.5, 0.6, 0.7], seed=seed) for seed in SEEDS), *FULL_ELSE],
        ["Unequal numbers of tokens: full 300, hml 200."],
    ),
    "rates": ([*HML_3[:-1], *FULL_3], ["Rates without a result: hml 0.0001.", "Unequal numbers of rates: full 3, hml 2."]),
    "rates of all": ([*HML_3[:-2], *FULL_3[:-2]], ["Rates without a result: full 0.01 and 0.0001, hml 0.01 and 0.0001."]),
    "readings": (
        [*HML_3, *(dataclasses.replace(one, request=DOCUMENTS_APART) for one in FULL_3)],
        ["Texts read in different ways: base by default, full document_mask=True, text_column=body, bf16=False, hml by default."],
    ),
    "defaults by name": ([*HML_3, *(dataclasses.replace(one, request=DEFAULTS) for one in FULL_3)], []),
    "not causal": (
        [*(dataclasses.replace(one, is_causal=False) for one in HML_3), *FULL_3],
        ["Not causal, so losses cannot be compared: hml."],
    ),
    "sizes": (
        [*HML_3, *(dataclasses.replace(one, trained_parameters=1300) for one in FULL_3)],
        [
            "Trained parameters more than 10 % off the median of variants that do not train everything: "
            "full 1,300 of 1,150, hml 1,000 of 1,150."
        ],
    ),
    "sizes within a tenth": ([*HML_3, *(dataclasses.replace(one, trained_parameters=1200) for one in FULL_3)], []),
    "all parameters": ([*HML_3, *(dataclasses.replace(one, trained_parameters=10**9, request=TRAINS_ALL) for one in FULL_3)], []),
    "an end of the rates": (
        [*HML_3, *(result("full", [1.0, 1.0], seed=seed, rate=1e-4) for seed in SEEDS), *FULL_3[:1], *FULL_ELSE[:1]],
        ["Best rate at an end of its list: full 0.0001."],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("results", "expected"), CAUTIONS.values(), ids=CAUTIONS)
def test_what_variants_differ_in_beside_their_methods_is_told(results, expected):
    assert cautions(found(results)) == expected


def test_null_controls_that_cannot_be_counted_yet_are_told():
    upscaled = {"hml": VariantOptions(upscale={"method": "midus-hml"})}
    waiting = dataclasses.replace(comparison(["hml"]), variants=upscaled)
    (sentence,) = cautions(findings(waiting, BASE, [], {}, missing=2))
    assert sentence == "Runs that are not done: 2; null controls of variants without a rate are not counted yet."


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
        "All rows were made with data aaaaaaaa; base bbbbbbbb; code 1 (cccccccc); machine P, 2 threads, cpu, torch 2, transformers 5."
    )
    assert cautions(made_with()) == cautions(made_with(code={**origin()["code"], "commit": "e" * 40})) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "e" * 64}, "Different data: base aaaaaaaa, full eeeeeeee, hml aaaaaaaa."),
        ({"code": {"version": "2", "sources": "f" * 64}}, "Different code: base 1 (cccccccc), full 2 (ffffffff), hml 1 (cccccccc)."),
        ({"machine": {**origin()["machine"], "threads": 1}}, "full P, 1 threads, cpu, torch 2, transformers 5"),
    ],
    ids=["data", "code", "machine"],
)  # fmt: skip
def test_rows_of_another_origin_are_told(changes, words):
    one, (kind,) = made_with(**changes), changes
    (sentence,) = cautions(one)
    assert words in sentence and f"{kind} " not in shared_origin(one)
    control = result("hml+one-row", [0.25, 0.25], control="one-row", control_of="hml", origin=changes)
    (sentence,) = cautions(found([*HML_3, control], variants=["hml"]))
    assert sentence.startswith(f"Different {kind}: base unknown, hml unknown and ")
