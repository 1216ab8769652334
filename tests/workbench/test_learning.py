"""What was learned and forgotten, spreads over seeds, and whether a null control was beaten."""

import math
import statistics

import pytest
from workbench.made_results import DOMAIN, RETENTION, result

from midus_workbench.learning import best_rate, change, change_at, mean_loss, spread, student_quantile, verdict

QUANTILES = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 10: 2.2281, 30: 2.0423}
"""Of Student's t distribution at 0.975, as printed in tables."""


@pytest.mark.parametrize("degrees", QUANTILES)
def test_the_quantiles_of_students_distribution_are_those_of_tables(degrees):
    assert student_quantile(degrees) == pytest.approx(QUANTILES[degrees], abs=5e-5)


def test_a_spread_is_that_of_its_numbers():
    numbers = [0.1, 0.4, 0.25]
    found = spread(numbers)
    assert (found.mean, found.deviation, found.count) == (statistics.mean(numbers), statistics.stdev(numbers), 3)
    assert found.half_interval == pytest.approx(4.302653 * statistics.stdev(numbers) / math.sqrt(3), rel=1e-5)
    assert (spread([0.5]).deviation, spread([0.5]).half_interval) == (None, None)


def test_change_is_from_a_run_s_own_start_to_its_end():
    run = result("a", [0.2, 0.5], [0.1, -0.3])
    assert change(run, [DOMAIN]) == pytest.approx(-0.5)
    assert change(run, [RETENTION]) == pytest.approx(-0.3)
    assert mean_loss(run.end, [DOMAIN, RETENTION]) == pytest.approx((2.5 + 1.7) / 2)


@pytest.mark.parametrize(
    ("learned", "expected"),
    [(0.0, 0.0), (0.1, 0.05), (0.2, 0.1), (0.35, 0.2), (0.5, 0.3), (0.6, None)],
    ids=str,
)
def test_forgetting_at_a_learning_lies_on_the_line_between_measurements(learned, expected):
    found = change_at(result("a", [0.2, 0.5], [0.1, 0.3]), learned, [DOMAIN], [RETENTION])
    assert found == (None if expected is None else pytest.approx(expected))


def test_the_first_time_that_a_run_has_learned_so_much_counts():
    run = result("a", [-0.25, 0.25, 0.0, 0.25], [0.5, 0.25, 1.0, 0.75])
    assert change_at(run, 0.25, [DOMAIN], [RETENTION]) == 0.25
    assert change_at(run, 0.0, [DOMAIN], [RETENTION]) == 0.375


def test_the_best_rate_is_that_of_the_lowest_mean_of_the_domain():
    runs = [result("a", [0.3], seed=0), result("a", [0.3], seed=1)]
    runs += [result("a", [0.5], seed=0, rate=1e-2), result("a", [0.2], seed=1, rate=1e-2)]
    assert best_rate(runs, [DOMAIN]) == {"learning_rate": 1e-2}


def test_a_rate_at_which_a_seed_is_missing_is_not_the_best():
    runs = [result("a", [0.3], seed=0), result("a", [0.3], seed=1), result("a", [0.9], seed=0, rate=1e-2)]
    assert best_rate(runs, [DOMAIN]) == {"learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("arm", "null", "words"),
    [
        ({0: 2.0, 1: 2.1, 2: 2.2}, {0: 2.5, 1: 2.61, 2: 2.69}, "beats it"),
        ({0: 2.0, 1: 2.1, 2: 2.2}, {0: 2.5, 1: 2.1, 2: 2.3}, "not shown to beat it"),
        ({0: 2.0, 1: 2.1}, {0: 2.0, 1: 2.05}, "does not beat it"),
        ({0: 2.0}, {0: 2.4}, "one seed"),
        ({0: 2.0}, {0: 1.9}, "does not beat it"),
    ],
    ids=["beats", "wide", "lower", "one", "one lower"],
)
def test_a_control_is_beaten_where_the_interval_of_the_advantage_lies_above_zero(arm, null, words):
    found = verdict("one-row", arm, null)
    assert found is not None and found.words == words
    assert found.advantage.mean == pytest.approx(statistics.mean(null[seed] - arm[seed] for seed in arm))


def test_runs_without_a_seed_in_common_are_not_compared():
    assert verdict("one-row", {0: 2.0}, {1: 2.0}) is None
    found = verdict("one-row", {0: 2.0, 1: 3.0}, {1: 3.5, 2: 0.0})
    assert found is not None and found.advantage == spread([0.5])
