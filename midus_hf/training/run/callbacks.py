"""Callbacks of a run's Trainer: interruptions, the seconds of training, the log file, and the table on the terminal."""

import contextlib
import json
import math
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from midus_hf.files.whole_files import whole_file
from midus_hf.training.output.disk_room import say
from midus_hf.training.run.held_out import perplexity_name

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds in which signals count as one, since launchers repeat a signal that the terminal already sent.
_SECONDS_OF_ONE_REQUEST = 1.0


class RunInterrupted(KeyboardInterrupt):
    """Error of a run that was interrupted and has ended in order; the message says how to resume it."""

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

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
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
        return {"args": {}, "attributes": {"seconds": self.seconds}}

    def resume(self, state: TrainerState) -> None:
        """Continue from the seconds that a run has trained."""
        # The Trainer only updates existing entries, and a new run has none for this callback.
        callbacks: dict[str, Any] = state.stateful_callbacks  # type: ignore[assignment]  # a list only until it has been read
        self.seconds = callbacks.setdefault(type(self).__name__, self.state())["attributes"]["seconds"]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._since = None
        self.resume(state)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
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

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._since is not None:
            self._since = time.perf_counter()

    on_evaluate = on_save


class TrainingLog(TrainerCallback):
    """Callback that writes every log event to a file; a resumed run continues the file at the step it resumes from.

    Events also fall on the steps that save a checkpoint, and on the last step, so that even a short run has a loss. A
    logged loss is the mean since the previous event; since events fall on checkpoints, a resumed run logs the same
    losses as an uninterrupted run.

    If the file cannot be written, as on a full disk, events wait until it can be, and a line on standard error says so.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._waiting = ""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            kept_events = [event for event in read_log(self.path) if event["step"] <= state.global_step]
            text = "".join(json.dumps(event) + "\n" for event in kept_events)
            with whole_file(self.path) as partial:
                partial.write_text(text, encoding="utf-8")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_save or 0 < state.max_steps <= state.global_step:
            control.should_log = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            is_first_failure = not self._waiting
            self._waiting += json.dumps(state.log_history[-1]) + "\n"
            try:
                append_whole(self.path, self._waiting)
                self._waiting = ""
            except OSError as error:
                if is_first_failure:
                    say(f"{self.path} cannot be written: {error.strerror}. Its events wait until it can.")


def append_whole(path: Path, text: str) -> None:
    """Append text in UTF-8 to a file, which is created if missing, completely or, if that raises `OSError`, not at all."""
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        content = text.encode()
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            file.truncate(size)
            raise


def read_log(path: str | os.PathLike) -> list[dict]:
    """Return the events of a `TrainingLog`, without a last line that was cut short; `[]` if the file does not exist."""
    path = Path(path)
    if not path.exists():
        return []
    whole_lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in whole_lines]


# Columns of the table, with their widths in characters.
_COLUMNS = {"tokens": 6, "loss": 7, "rate": 8, "grad norm": 9, "tokens/s": 9, "left": 8}
_HELD_OUT = {"perplexity": 10}
_LINE = 80


class ProgressTable(TrainerCallback):
    """Callback that prints a row per log event, and shows a progress bar on a terminal.

    Rows go to standard output, the bar to standard error.

    A row has the step, the tokens trained on so far, the loss, the rate of the first group of parameters, the norm of
    the gradient, tokens per second since the previous row, the time left, and the perplexity of the held-out text where
    it was measured; perplexities of texts with names are printed below the row. The table fits into 80 columns; the log
    file has everything else.

    Args:
        held_out: Names of the held-out texts that are measured, as in `RunOptions.eval_texts`.
        clock: Clock of the run, which knows the seconds left until `max_seconds`.
    """

    def __init__(self, held_out: Sequence[str], clock: TrainingClock):
        self.held_out, self.clock = held_out, clock
        self.columns = _COLUMNS | (_HELD_OUT if "" in held_out else {})
        self._bar: tqdm | None = None
        self._row: dict[str, str] = {}
        self._step_width = 0
        self._first_step = self._last_tokens = 0
        self._started = self._last_time = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._started = self._last_time = time.perf_counter()
        self._first_step, self._last_tokens = state.global_step, state.num_input_tokens_seen
        self._step_width = max(5, len(f"{state.max_steps:,}"))
        print(self._line("step", {name: name for name in self.columns}), flush=True)
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            disable=None,
            leave=False,
            dynamic_ncols=True,
            bar_format="{percentage:3.0f} %|{bar}| {n:,}/{total:,} [{elapsed}<{remaining}]",
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            now = time.perf_counter()
            tokens, seconds = state.num_input_tokens_seen - self._last_tokens, now - self._last_time
            seconds_a_step = (now - self._started) / max(state.global_step - self._first_step, 1)
            self._last_time, self._last_tokens = now, state.num_input_tokens_seen
            self._row |= {
                "tokens": short_count(state.num_input_tokens_seen),
                "loss": f"{logs['loss']:.4f}",
                "rate": f"{logs['learning_rate']:.2e}",
                "grad norm": f"{logs['grad_norm']:.3g}" if "grad_norm" in logs else "",
                "tokens/s": f"{tokens / seconds:,.0f}",
                "left": short_time(
                    min((state.max_steps - state.global_step) * seconds_a_step, self.clock.seconds_left)
                ),
            }
        measured = {name: f"{logs[key]:.4f}" for name in self.held_out if (key := perplexity_name(name)) in logs}
        if "" in measured:
            self._row["perplexity"] = measured[""]
        # If held-out text is about to be measured, the row waits for its perplexity.
        if measured or not control.should_evaluate:
            self._print_row(state.global_step, [f"{name} {value}" for name, value in measured.items() if name])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._last_time = time.perf_counter()

    on_evaluate = on_save

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _print_row(self, step: int, perplexities: Sequence[str]) -> None:
        lines = [self._line(f"{step:,}", self._row)] if self._row or perplexities else []
        if perplexities:
            indent = " " * (self._step_width + 2)
            perplexity_line = f"perplexity of {', '.join(perplexities)}"
            lines += textwrap.wrap(
                perplexity_line, _LINE, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
            )
        for line in lines:
            if self._bar is None or self._bar.disable:
                print(line, flush=True)
            else:
                self._bar.write(line, file=sys.stdout)
        self._row = {}

    def _line(self, step: str, cells: dict[str, str]) -> str:
        return "  ".join(
            [step.rjust(self._step_width), *(cells.get(name, "").rjust(width) for name, width in self.columns.items())]
        ).rstrip()


def short_count(number: int) -> str:
    """Format a count from 0, below a quadrillion, in at most six characters, such as `1.64B`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= 0.9995 * size:
            value = number / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{unit}"
    return str(number)


def short_time(seconds: float) -> str:
    """Format a duration of 0 or more seconds in at most eight characters, such as `1:02:03` or `3d 04h`."""
    whole = round(seconds)
    if whole >= 100 * 3600:
        return f"{whole // 86400}d {whole % 86400 // 3600:02}h"
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
