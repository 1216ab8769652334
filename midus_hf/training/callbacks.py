"""Callbacks of a run: its progress on the terminal, and an end with a checkpoint when a signal arrives."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import has_length

from midus_hf.config.errors import is_main_process, print_note
from midus_hf.sources.progress import show_progress
from midus_hf.training.keys import ENOUGH_STEPS

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds in which signals count as one, since launchers repeat a signal that the terminal already sent.
_SECONDS_OF_ONE_REQUEST = 1.0
# With fewer steps there is a warning, which recommends `ENOUGH_STEPS`.
_FEW_STEPS = 30
# Steps of as many seconds are compared with their processor time; a quiet machine gives a run of several threads more than one core.
_SECONDS_COMPARED, _SECONDS_PER_PROCESSOR_SECOND = 10.0, 1.5


class RunReport(TrainerCallback):
    """Prints what a run reads, its steps, whether they are few, and, without bars, a line each minute.

    The number of sequences is None for a stream; its place in the run is that of its steps, also after a resumption. A note says
    once that other programs use the cores, so that threads wait for each other; a process with one thread, or that waits for a GPU
    or other processes, is excluded.
    """

    _is_noted = False
    _began = (0.0, 0.0)  # a step: the time, and the processor time of all threads
    _seconds = _processor_seconds = 0.0

    def __init__(self, reads: str, num_sequences: int | None):
        self.reads = reads
        self.num_sequences = num_sequences
        self._training: Any = None
        self._evaluation: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        steps = state.max_steps
        if args.process_index == 0:
            count = "1 step" if steps == 1 else f"{steps:,} steps"
            print(f"{self.reads}; {count} ({self._how_often(args, steps)})", flush=True)
            if steps < _FEW_STEPS:
                _note_few_steps(args, steps)
        if args.disable_tqdm and not sys.stderr.isatty():  # else the Trainer has bars
            begun: dict[str, Any] = {"total": steps, "initial": state.global_step}
            self._training = show_progress(desc="training", unit=" steps", leave=False, **begun)

    def _how_often(self, args: Any, steps: int) -> str:
        """Return how often so many steps read each sequence."""
        if self.num_sequences is None:
            return f"{steps * args.sequences_per_step:,} sequences"
        # The last step of an epoch may read fewer sequences than the others.
        count = self.num_sequences
        batch = args.train_batch_size * args.world_size
        batches = max(1, count // batch if args.dataloader_drop_last else math.ceil(count / batch))
        of_epoch = min(batches * batch, count)
        epochs, others = divmod(steps, math.ceil(batches / args.gradient_accumulation_steps))
        times = (epochs * of_epoch + min(others * args.sequences_per_step, of_epoch)) / count
        if times < 1:
            return f"{times:.0%} of the sequences"
        return "once each" if times == 1 else f"{times:.3g} times each"

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.monotonic(), time.process_time()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.num_sequences is None:  # the Trainer counts from where it began to read
            state.epoch = state.global_step / state.max_steps
        if self._training is not None:
            self._training.update()
        threads = torch.get_num_threads()
        if self._is_noted or threads == 1 or args.world_size > 1 or args.device.type != "cpu":
            return
        self._seconds += time.monotonic() - self._began[0]
        self._processor_seconds += time.process_time() - self._began[1]
        if self._seconds < _SECONDS_COMPARED:
            return
        if self._seconds > _SECONDS_PER_PROCESSOR_SECOND * self._processor_seconds:
            self._is_noted = True
            print_note(
                f"steps took {self._seconds:.0f} s, and {threads} threads got {self._processor_seconds:.0f} s of processor time: "
                "other programs use the cores, and threads wait for each other. With OMP_NUM_THREADS=1 none waits"
            )
        self._seconds = self._processor_seconds = 0.0

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **_: Any
    ) -> None:
        if self._training is None:
            return
        if self._evaluation is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self._evaluation = show_progress(desc="evaluating", unit=" batches", leave=False, total=total)
        self._evaluation.update()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._evaluation = None


def _note_few_steps(args: Any, steps: int) -> None:
    remedy = "raise max_steps"
    if args.max_steps <= 0:
        epochs = math.ceil(ENOUGH_STEPS * args.num_train_epochs / steps)
        remedy = f"num_train_epochs={epochs} takes at least {ENOUGH_STEPS}"
    count = "1 step is" if steps == 1 else f"{steps} steps are"
    print_note(f"{count} few, so a model learns little: {remedy}")


class GracefulStop(TrainerCallback):
    """Callback that ends training, with a checkpoint, after the step in which SIGINT or SIGTERM arrives.

    All processes end in the same step: `largest` returns the maximum over processes. A signal during the last step has no effect; a
    second one acts at once. It also logs where a run saves or measures, and in the last step: a logged loss is the mean since the
    previous event, so a resumed run logs the losses of an uninterrupted one.
    """

    def __init__(self, largest: Callable[[int], int]):
        self.largest = largest
        self.signal_number = 0  # for which all processes have stopped; 0 if there was none
        self._noted = 0
        self._noted_at = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            # A signal that the process ignores, as under nohup, stays ignored.
            handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, self._note) for number in handled}

    def release(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    __exit__ = release

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        noted = self.largest(self._noted)
        if noted and state.global_step < state.max_steps and not control.should_training_stop:
            self.signal_number = noted
            control.should_training_stop = control.should_save = True
        if control.should_save or control.should_evaluate or 0 < state.max_steps <= state.global_step:
            control.should_log = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.signal_number:  # training that stops ends the epoch, which would measure all held-out texts first
            control.should_evaluate = control.should_save = False
        if control.should_save or control.should_evaluate:
            control.should_log = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._noted:
            self._noted = number
            self._noted_at = time.monotonic()
            if is_main_process():
                # print is unsafe here: the signal may have interrupted another print.
                with contextlib.suppress(OSError):  # the reader may be gone
                    os.write(2, b"\nStopping after this step, with a checkpoint; interrupt again to stop at once.\n")
        elif time.monotonic() - self._noted_at > _SECONDS_OF_ONE_REQUEST:
            self.release()
            signal.raise_signal(number)
