"""Runs in which something happens at a step, or is watched."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from transformers import TrainerCallback

from midus_hf.training.callbacks import RunInterrupted
from midus_hf.training.run import TrainingRun

# Moments of a step: before and after the parameters move, when it counts as done, and when its checkpoint is there.
BEFORE, AFTER, END, SAVED = "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_save"


class AtStep(TrainerCallback):
    """Does something at a step, or at every one: `work` is given the model."""

    def __init__(self, step: int | None, work: Callable[[Any], Any], moment: str = BEFORE):
        self.step, self.work, self.is_done = step, work, moment in (END, SAVED)
        setattr(self, moment, self._look)

    def _look(self, args, state, control, model=None, **kwargs):
        if self.step in (None, state.global_step + (not self.is_done)):
            self.work(model)


class NotedRates(TrainerCallback):
    """Notes the rate of each group of parameters at every step."""

    def __init__(self):
        self.of_group: dict[str, list[float]] = {}

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
        for group in optimizer.param_groups:
            self.of_group.setdefault(group["name"], []).append(group["lr"])


def signal_at(step: int, number: signal.Signals = signal.SIGINT) -> AtStep:
    """Signal this process in the middle of a step."""
    return AtStep(step, lambda model: signal.raise_signal(number))


def interrupted(run: TrainingRun, step: int, number: signal.Signals = signal.SIGINT) -> RunInterrupted:
    """Train until a signal ends the run after a step, with a checkpoint; return what is raised."""
    run.trainer.add_callback(signal_at(step, number))
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RunInterrupted) as raised:
        run.execute()
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    return raised.value
