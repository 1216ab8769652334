"""Ctrl-C and SIGTERM end a run after the current step, with a checkpoint; a second signal ends it at once."""

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
# Seconds in which signals count as one, since launchers repeat a signal that the terminal already sent.
_SECONDS_OF_ONE_REQUEST = 1.0


class RunInterrupted(KeyboardInterrupt):
    """Error of a run that was interrupted and has ended in order; the message says how to resume it.

    Args:
        message: Text for the user.
        signal_number: Number of the signal that interrupted the run.
    """

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class Interruption(TrainerCallback):
    """Callback that notes signals inside its context, and ends training at the end of the step in which a signal came.

    All processes end training in the same step. A signal during the last step, or after it, changes nothing, even where
    an earlier callback makes a step the last: the model is saved anyway. Outside the main thread, where Python handles
    no signals, no signal is noted.

    Args:
        largest: Returns the largest of the numbers with which the processes call it.
    """

    def __init__(self, largest: Callable[[int], int]):
        self.largest = largest
        # The signal for which all processes have stopped; 0 if there was none.
        self.signal_number = 0
        self._noted = 0
        self._noted_at = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            # A signal that the process ignores, as under nohup, stays ignored.
            handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Restore the previous effect of signals inside the context."""
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
                # print is unsafe here: the signal may have interrupted another print.
                os.write(2, b"\nStopping after this step, with a checkpoint; once more stops at once.\n")
        elif time.monotonic() - self._noted_at > _SECONDS_OF_ONE_REQUEST:
            self.__exit__(None, None, None)
            signal.raise_signal(number)
