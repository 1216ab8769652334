"""What was learned and forgotten, spreads over seeds, and whether a null control was beaten."""

import dataclasses
import math
import statistics

import pytest
from compare.made_results import BASE, DOMAIN, RETENTION, VALIDATION, result

from midus_hf.compare.learning import (
    Spread,
    chosen_rate,
    falls,
    mean_loss,
    origin,
    paired,
    spread,
    student_quantile,
    verdict,
)

# Of Student's t distribution at 0.975, as printed in tables.
QUANTILES = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 10: 2.2281, 30: 2.0423}


@pytest.mark.parametrize("degrees", QUANTILES)
def test_the_quantiles_of_students_distribution_are_those_of_tables(degrees):
    assert student_quantile(degrees) == pytest.approx(QUANTILES[degrees], abs=5e-5)


def test_a_spread_is_that_of_its_numbers():
    numbers = [0.1, 0.4, 0.25]
    result = spread(numbers)
    assert (result.mean, result.deviation, result.count) == (statistics.mean(numbers), statistics.stdev(numbers), 3)
    assert result.half_interval == pytest.approx(4.302653 * statistics.stdev(numbers) / math.sqrt(3), rel=1e-5)
    assert (spread([0.5]).deviation, spread([0.5]).half_interval) == (None, None)


@pytest.mark.parametrize(
    ("numbers", "half"),
    [([1.0, 2.0], 12.7062 / 2), ([1.0, 1.0, 3.0, 3.0], 3.1824 / math.sqrt(3)), ([0.5, 0.5], 0.0)],
    ids=["two", "four", "alike"],
)
def test_the_interval_of_a_mean_is_that_of_students_distribution(numbers, half):
    assert spread(numbers).half_interval == pytest.approx(half, rel=1e-4)


def test_an_interval_that_reaches_zero_is_not_above_it():
    half = Spread(0.0, 1.0, 3).half_interval
    assert half == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert [Spread(mean, 1.0, 3).is_above_zero for mean in (half + 1e-9, half, 0.0, -half - 1)] == [
        True,
        False,
        False,
        False,
    ]
    assert not Spread(9.0, None, 1).is_above_zero


def test_a_mean_loss_counts_each_text_alike():
    run = result("a", [0.2, 0.5], [0.1, -0.3])
    assert mean_loss(run.losses, [DOMAIN, RETENTION]) == pytest.approx((2.5 + 1.7) / 2)


def test_a_run_is_held_against_its_own_start_where_that_is_the_base():
    run = result("a", [0.2], loss=3.5)
    assert origin(run, BASE) is run.start.losses


def test_losses_fall_from_the_start_at_each_moment():
    run = result("a", [0.25, 0.5], [0.125, -0.25])
    assert (falls(run, BASE, [DOMAIN]), falls(run, BASE, [RETENTION])) == ([0.0, 0.25, 0.5], [0.0, -0.125, 0.25])


def test_to_make_up_for_a_start_below_the_base_is_neither_to_learn_nor_to_remember():
    # The Trainer measures 0.5 more on plants than midus eval does, and 0.25 less on stars.
    run = result(
        "a", [4.0, 4.5], [-1.0, -0.5], loss=7.5, kept=2.75, upscaled={DOMAIN: 7.0, RETENTION: 3.0, VALIDATION: 8.0}
    )
    assert (falls(run, BASE, [DOMAIN]), falls(run, BASE, [RETENTION])) == ([-4.0, 0.0, 0.5], [-1.0, 0.0, -0.5])


def test_the_rate_is_chosen_by_the_validation_texts_alone():
    # The loss of the domain is lower at the first rate, that of the validation text at the second.
    runs = [with_loss(result("a", [0.9]), 3.5), with_loss(result("a", [0.3], rate=1e-2), 3.25)]
    assert chosen_rate(runs, [VALIDATION]) == {"learning_rate": 1e-2}


def with_loss(run, loss: float):
    """Return a run whose loss of the validation text ended at a value."""
    end = dataclasses.replace(run.curve[-1], losses={**run.losses, VALIDATION: loss})
    return dataclasses.replace(run, curve=[*run.curve[:-1], end])


def test_of_rates_that_are_as_good_the_first_counts():
    runs = [result("a", [0.3], rate=rate) for rate in (1e-2, 1e-3)]
    assert chosen_rate(runs, [VALIDATION]) == {"learning_rate": 1e-2}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_rate_whose_loss_ended_at_no_finite_number_is_not_chosen(loss):
    runs = [with_loss(result("a", [0.3], rate=1e-2), loss), result("a", [0.1])]
    assert chosen_rate(runs, [VALIDATION]) == {"learning_rate": 1e-3}
    assert chosen_rate(runs[:1], [VALIDATION]) is None and chosen_rate([], [VALIDATION]) is None


def test_a_single_rate_needs_no_validation_text():
    assert chosen_rate([result("a", [0.3])], []) == {"learning_rate": 1e-3}


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


def test_numbers_are_subtracted_seed_by_seed():
    assert paired({0: 1.0, 1: 2.0, 3: 9.0}, {1: 2.25, 0: 1.75, 2: 0.0}) == spread([0.75, 0.25])
    assert paired({0: 1.0}, {1: 1.0}) is None
