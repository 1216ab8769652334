"""Progress of a run on the terminal: a table with one row per log event, above a progress bar."""

import math
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from midus_hf.training.data.held_out import perplexity_name
from midus_hf.training.run.training_clock import TrainingClock

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
        held_out: Names of the held-out texts that are measured, as in `RunOptions.eval_texts`. Default: none.
        clock: Clock of the run, which knows the seconds left until `max_seconds`. Default: None, there is no limit.
    """

    def __init__(self, held_out: Sequence[str] = (), clock: TrainingClock | None = None):
        self.held_out, self.clock = held_out, clock
        self.columns = _COLUMNS | (_HELD_OUT if "" in held_out else {})
        self._bar: tqdm | None = None
        self._row: dict[str, str] = {}
        self._step_width = 0
        self._first_step = self._last_tokens = 0
        self._started = self._last_time = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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
            seconds_allowed = math.inf if self.clock is None else self.clock.seconds_left
            seconds_a_step = (now - self._started) / max(state.global_step - self._first_step, 1)
            self._last_time, self._last_tokens = now, state.num_input_tokens_seen
            self._row |= {
                "tokens": short_count(state.num_input_tokens_seen),
                "loss": f"{logs['loss']:.4f}",
                "rate": f"{logs['learning_rate']:.2e}",
                "grad norm": f"{logs['grad_norm']:.3g}" if "grad_norm" in logs else "",
                "tokens/s": f"{tokens / seconds:,.0f}",
                "left": short_time(min((state.max_steps - state.global_step) * seconds_a_step, seconds_allowed)),
            }
        measured = {name: f"{logs[key]:.4f}" for name in self.held_out if (key := perplexity_name(name)) in logs}
        if "" in measured:
            self._row["perplexity"] = measured[""]
        # If held-out text is about to be measured, the row waits for its perplexity.
        if measured or not control.should_evaluate:
            self._print_row(state.global_step, [f"{name} {value}" for name, value in measured.items() if name])

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._last_time = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._last_time = time.perf_counter()

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
    """Format a count in at most six characters, such as `1.64B`.

    Args:
        number: A count from 0, below a quadrillion.
    """
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= 0.9995 * size:
            value = number / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{unit}"
    return str(number)


def short_time(seconds: float) -> str:
    """Format a duration in at most eight characters, such as `1:02:03` or `3d 04h`.

    Args:
        seconds: Duration in seconds, 0 or more.
    """
    whole = round(seconds)
    if whole >= 100 * 3600:
        return f"{whole // 86400}d {whole % 86400 // 3600:02}h"
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
