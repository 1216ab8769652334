"""How long a run has trained, over all its resumptions, and its end when that is as long as it may."""

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
    """Count the seconds that steps take, and end training after the step in which they reach a limit.

    They are counted from the first step on, data included, without evaluations and checkpoints. With a limit, a step ends
    when the device has computed it, and all processes count the seconds of the slowest, so that all end at the same step.
    Checkpoints have the seconds, with which a resumed run goes on.

    Args:
        limit: Seconds after which to end. Default: none.
        largest: Gives the largest of the numbers that the processes call it with.
        measures: Whether held-out text is to be measured when training ends.
    """

    def __init__(self, limit: float | None, largest: Callable[[int], int], measures: bool):
        self.limit, self.largest, self.measures = limit, largest, measures
        self.seconds = 0.0
        """Seconds of training so far."""
        self.has_ended_training = False
        """Whether training has ended since it was as long as it may be, before its last step."""
        self._since: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether training has been as long as it may."""
        return self.limit is not None and self.seconds >= self.limit

    @property
    def seconds_left(self) -> float:
        """Seconds that are left for training."""
        return math.inf if self.limit is None else max(self.limit - self.seconds, 0.0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        return {"args": {}, "attributes": {_SECONDS: self.seconds}}

    def resume(self, state: TrainerState) -> None:
        """Go on with the seconds that a run had trained.

        Args:
            state: Of its checkpoint, or of a new run.
        """
        # The Trainer brings up to date what is there. A checkpoint of a run that did not count its seconds has nothing.
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
            # As after the last step of a run that saves checkpoints.
            control.should_save = control.should_save or args.save_strategy != "no"

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._leave_out()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._leave_out()

    def _leave_out(self) -> None:
        """Do not count what has passed since the last step ended."""
        if self._since is not None:
            self._since = time.perf_counter()
