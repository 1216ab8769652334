"""Seconds that a run has trained, over all its resumptions, and the end of training at a limit."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from midus_hf.training.output.saving import say

_SECONDS = "seconds"


class TrainingClock(TrainerCallback, ExportableState):
    """Callback that counts the seconds of training steps, and ends training after the step in which they reach a limit.

    Seconds count from the first step on, including the loading of data, without evaluations and checkpoints. With a
    limit, a step ends when the device has computed it, and all processes count the seconds of the slowest process, so
    that all end at the same step. Checkpoints store the seconds, from which a resumed run goes on.

    Args:
        limit: Seconds after which to end; None for no limit.
        largest: Returns the largest of the numbers with which the processes call it.
        measures: Whether held-out text is measured when training ends.
    """

    def __init__(self, limit: float | None, largest: Callable[[int], int], measures: bool):
        self.limit, self.largest, self.measures = limit, largest, measures
        # Seconds of training so far.
        self.seconds = 0.0
        # Whether the limit has ended training before its last step.
        self.has_ended_training = False
        self._since: float | None = None

    @property
    def is_over(self) -> bool:
        """True if the seconds of training have reached the limit."""
        return self.limit is not None and self.seconds >= self.limit

    @property
    def seconds_left(self) -> float:
        """Seconds left for training; infinite without a limit."""
        return math.inf if self.limit is None else max(self.limit - self.seconds, 0.0)

    def state(self) -> dict[str, Any]:
        """Return the state of this callback that a checkpoint stores."""
        return {"args": {}, "attributes": {_SECONDS: self.seconds}}

    def resume(self, state: TrainerState) -> None:
        """Continue from the seconds that a run has trained.

        Args:
            state: State in the run's checkpoint, or of a new run.
        """
        # The Trainer only updates existing entries, and checkpoints of earlier versions have none for this callback.
        callbacks: dict[str, Any] = state.stateful_callbacks  # type: ignore[assignment]  # a list only until it has been read
        self.seconds = callbacks.setdefault(type(self).__name__, self.state())["attributes"][_SECONDS]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._since = None
        self.resume(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._since is not None, "a step has begun"
        if self.limit is not None and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = time.perf_counter()
        nanoseconds = int((now - self._since) * 1e9)
        self.seconds += (nanoseconds if self.limit is None else self.largest(nanoseconds)) / 1e9
        self._since = now
        if self.is_over and state.global_step < state.max_steps:
            say(
                f"Training ends after step {state.global_step:,} of {state.max_steps:,}: it has taken {self.seconds:,.1f} s, and "
                f"max_seconds is {self.limit:g}."
            )
            self.has_ended_training = control.should_training_stop = control.should_log = True
            control.should_evaluate = control.should_evaluate or self.measures
            # A run that saves checkpoints also saves one after its last step.
            control.should_save = control.should_save or args.save_strategy != "no"

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._leave_out()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._leave_out()

    def _leave_out(self) -> None:
        """Exclude the time since the last step ended."""
        if self._since is not None:
            self._since = time.perf_counter()
