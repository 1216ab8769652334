"""The rates that values have in a run."""

import math

import pytest
from training.steered_runs import executed_with_rates

from midus_hf.training.run import TrainingRun


@pytest.mark.parametrize(
    ("value_schedule", "factor"),
    [("fixed", lambda step: 1), ("4x-to-1x", lambda step: max(1, 4 - 3 * step / 5))],
    ids=["fixed", "4x-to-1x"],
)
def test_values_follow_their_schedule(config_for, value_schedule, factor):
    options = {"value_schedule": value_schedule, "value_learning_rate": 3e-2, "key_value_learning_rate": 3e-3}
    rates = executed_with_rates(TrainingRun(config_for(**options)))
    main = [rate / 1e-2 for rate in rates["decay"]]
    assert main[:3] == [0, 0.5, 1] and main[11] == pytest.approx(0.5) and 0 < main[19] < 0.01
    assert main[2:] == pytest.approx([(1 + math.cos(math.pi * i / 18)) / 2 for i in range(18)])
    assert rates["values"] == pytest.approx([3e-2 * factor(step) * main[step] for step in range(20)])
    assert rates["keys"] == [3e-3] * 20
