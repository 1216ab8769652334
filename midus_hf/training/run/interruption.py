"""Ctrl-C and SIGTERM end a run after the step at hand, with a checkpoint; a second one ends it at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SECONDS_OF_ONE_REQUEST = 1.0
"""A launcher passes on a signal that the terminal has sent to its processes already."""


class RunInterrupted(KeyboardInterrupt):
    """A run was interrupted and has ended in order; the message says how it goes on.

    Args:
        message: For a person.
        signal_number: What interrupted it.
    """

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class Interruption(TrainerCallback):
    """While entered, note signals, and end training at the end of the step in which one came.

    Training then ends in the same step on all processes. A signal in the last step changes nothing, also where a callback
    before this one makes it the last, nor does one after it: the model is about to be saved, or being saved. Outside the
    main thread, where Python handles no signals, none is noted.

    Args:
        largest: Gives the largest of the numbers that the processes call it with.
    """

    def __init__(self, largest: Callable[[int], int]):
        self.largest = largest
        self.signal_number = 0
        """The signal for which all processes have stopped; 0 if none."""
        self._noted = 0
        self._noted_at = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            # A signal that is ignored, as under nohup, stays so.
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Let signals do within what they did before."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        noted = self.largest(self._noted)
        if noted and state.global_step < state.max_steps and not control.should_training_stop:
            self.signal_number = noted
            control.should_training_stop = control.should_save = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._noted:
            self._noted, self._noted_at = number, time.monotonic()
            if PartialState().is_main_process:
                # Not print: the signal may have come in the middle of one.
                os.write(2, b"\nStopping after this step, with a checkpoint; once more stops at once.\n")
        elif time.monotonic() - self._noted_at > _SECONDS_OF_ONE_REQUEST:
            self.__exit__(None, None, None)
            signal.raise_signal(number)
