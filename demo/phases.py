"""Phases of a demonstration: commands that show their progress, and whose results are kept for the next call."""

import ast
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from midus_hf.files.outputs import atomic_write
from midus_hf.training.checkpoints import find_latest_complete

# File in the folder of a demonstration with the finished phases.
RECORD = "phases.json"
# A phase that prints nothing for this many seconds shows its progress.
SECONDS = 30.0
# Steps of a training from whose times the remaining time is estimated.
_LAST_STEPS = 5
# Signals that end a demonstration; a command gets SIGTERM if it does not handle the signal itself.
_SIGNALS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


class Phases:
    """The phases of a demonstration, in order, and the record of those that earlier calls finished.

    A call continues after the finished phases, if the earlier call had the same settings and did not reach the end.

    Args:
        folder: Folder of the demonstration's files. If it is the default folder, files of another run are removed.
        default: The default folder.
        count: Number of phases.
        settings: What the results depend on, as JSON holds it.

    Raises:
        SystemExit: If another folder than the default contains files from which a call with these settings cannot continue.
    """

    def __init__(self, folder: Path, default: Path, count: int, settings: dict[str, Any]):
        self._file = folder / RECORD
        self._count = count
        self._number = 0
        earlier = json.loads(self._file.read_text(encoding="utf-8")) if self._file.is_file() else None
        if earlier is not None and earlier["settings"] == settings and not earlier["finished"]:
            self._record = earlier
            print(f"{folder} holds an earlier run, which this one continues; remove the folder to start over.")
        else:
            if folder == default:
                if folder.exists():
                    print(f"removing {folder}, an earlier run that ended or had other settings")
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                sys.exit(
                    f"demo: --output is {str(folder)!r}, which holds files; expected a new or an empty folder, or that of a run "
                    "with the same settings that was interrupted."
                )
            folder.mkdir(parents=True, exist_ok=True)
            self._record = {"settings": settings, "finished": False, "phases": {}}
            self._write()

    @property
    def commands(self) -> list[str]:
        """The commands of all phases."""
        return [phase["command"] for phase in self._record["phases"].values()]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each phase took, in this call and earlier ones, by its name."""
        return {name: phase["seconds"] for name, phase in self._record["phases"].items()}

    def announce(self, what: str, about: float) -> float:
        """Print the first line of a phase; `about` is its time in seconds on two cores. Return the time to expect here.

        Where the phases that ended took longer than on two cores, the next are expected to, too.
        """
        self._number += 1
        ended = [phase for phase in self._record["phases"].values() if phase["ended"]]
        about *= max(1, sum(phase["seconds"] for phase in ended) / max(1, sum(phase["about"] for phase in ended)))
        print(f"\n[{self._number}/{self._count}] {what}, about {duration(about)}", flush=True)
        return about

    def run(
        self,
        name: str,
        what: str,
        about: float,
        *words: object,
        makes: Path | None = None,
        output: Path | None = None,
        steps: int | None = None,
    ) -> None:
        """Run the command of a phase, unless it has ended in an earlier call; a command that fails ends the program.

        Args:
            name: Name in the record.
            what: What the phase does.
            about: Its time in seconds, as in `announce`.
            words: The command.
            makes: Folder that the command makes; unfinished results of an earlier call are removed.
            output: File for the output of the command, instead of the screen.
            steps: Number of steps, for a command that trains into `makes` and continues from the checkpoint there; its log is
                shown as a line of progress.
        """
        line = list(map(str, words))
        command = shlex.join(line) + ("" if output is None else f" > {shlex.quote(str(output))}")
        phase = self._record["phases"].setdefault(
            name, {"command": command, "about": about, "seconds": 0.0, "ended": False}
        )
        if phase["ended"]:
            self._number += 1
            print(f"\n[{self._number}/{self._count}] {what}: done, in {duration(phase['seconds'])}", flush=True)
            return
        about = self.announce(what, about)
        print(f"$ {command}", flush=True)
        if makes is not None and steps is None:
            shutil.rmtree(makes, ignore_errors=True)
        progress = Progress(about) if steps is None else TrainingProgress(steps, "--eval_on_start=true" in line, about)
        started = time.monotonic()
        before = phase["seconds"]
        try:
            status, printed, stopped = _show(line, progress, is_shown=output is None)
        finally:
            phase["seconds"] = before + time.monotonic() - started
            self._write()
        if stopped:
            print(f"\ndemo: interrupted while {what}; the same command continues from here.", file=sys.stderr)
            sys.exit(128 + stopped)
        if status:
            sys.exit(
                f"demo: the command above failed with exit status {status}; the same command begins again with it."
            )
        if output is not None:
            with atomic_write(output) as partial:
                partial.write_text(printed, encoding="utf-8")
        phase["ended"] = True
        self._write()

    def finish(self) -> None:
        """Record that everything is done, so that the next call starts over."""
        self._record["finished"] = True
        self._write()

    def _write(self) -> None:
        with atomic_write(self._file) as partial:
            partial.write_text(json.dumps(self._record, indent=2) + "\n", encoding="utf-8")


class Progress:
    """Progress of a command that does not report any: the time that it has taken."""

    def __init__(self, about: float):
        self._about = about
        self.started = time.monotonic()

    def take(self, line: str) -> bool:
        """Read a line of the command, and return whether it belongs on the screen."""
        return True

    def __str__(self) -> str:
        taken = time.monotonic() - self.started
        expected = "of about" if taken <= self._about else "longer than the expected"
        return f"{duration(taken)} so far, {expected} {duration(self._about)}"


class TrainingProgress(Progress):
    """Progress of a command that trains, from the output of the Trainer: a dict after each step, and others for evaluations.

    Args:
        steps: Number of steps at the end.
        measures_first: Whether held-out texts are evaluated before the first step. Default: false.
        about: Seconds to expect, until steps tell. Default: not known.
    """

    def __init__(self, steps: int, measures_first: bool = False, about: float = 0.0):
        super().__init__(about)
        self._measures_first = measures_first
        self._steps = steps
        self._first = 0
        self._done = 0
        self._loss = ""
        # Of steps, after the beginning of the first of them.
        self._ends = deque([self.started], maxlen=_LAST_STEPS + 1)
        self._doing = "reading texts and model"

    def take(self, line: str) -> bool:
        if resumed := re.match(r"resuming from .*checkpoint-(\d+)$", line):
            self._first = self._done = int(resumed[1])
        if not line.startswith("{'"):
            if self._done == self._first:  # texts and model are read now
                measured = "measuring held-out texts, then " if self._measures_first else ""
                self._begin()
                self._doing = f"{measured}in step {self._first + 1}"
            return True
        event = ast.literal_eval(line)
        if "loss" in event:
            self._done += 1
            self._loss = f", loss {float(event['loss']):.3f}"
            self._ends.append(time.monotonic())
        elif self._done == self._first:
            self._begin()  # the evaluation before the first step does not predict the remaining time
        return False

    def _begin(self) -> None:
        self._ends.clear()
        self._ends.append(time.monotonic())

    def __str__(self) -> str:
        new = len(self._ends) - 1
        now = time.monotonic()
        ending = self._doing + (f", about {duration(self._about)} expected in all" if self._about else "")
        if self._done >= self._steps:
            ending = "measuring held-out texts and saving"
        elif new:
            of_a_step = (self._ends[-1] - self._ends[0]) / new
            since = now - self._ends[-1]
            left = of_a_step * (self._steps - self._done) - since
            ending = f"about {duration(left)} left"
            if since > 2 * of_a_step:
                ending = f"the next has taken {duration(since)}, and those before {duration(of_a_step)} each"
        return f"{duration(now - self.started)}: step {self._done} of {self._steps}{self._loss}, {ending}"


def run_demo(main: Callable[[], None]) -> None:
    """Run a demonstration, which Ctrl-C ends with one line, between its commands too."""
    try:
        main()
    except KeyboardInterrupt:
        print("\ndemo: interrupted; the same command continues from here.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def schedule(steps: int, times: int | None, output: Path) -> list[str]:
    """Return the keys of a run for its steps, its checkpoints, and evaluations at the start and a number of times.

    A run that continues from a checkpoint in `output` has been evaluated at its start.
    """
    keys = [
        f"--max_steps={steps}",
        f"--save_steps={math.ceil(steps / 5)}",
        "--save_total_limit=1",
        "--resume_from_checkpoint=auto",
    ]
    if times is not None:
        starts = not output.is_dir() or find_latest_complete(output) is None
        keys += [f"--eval_steps={math.ceil(steps / times)}", f"--eval_on_start={str(starts).lower()}"]
    return [*keys, "--disable_tqdm=true"]


def duration(seconds: float) -> str:
    """Return a time in words: seconds up to a minute and a half, tenths of minutes up to ten."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{round(seconds / 60, 1 if seconds < 600 else None):g} min"


def _show(line: list[str], progress: Progress, is_shown: bool) -> tuple[int, str, int]:
    """Run a command, show its output and progress, and return its status, its output, and the signal that ended it.

    The command has a separate process group and gets each signal once, from here.
    """
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, text=True, process_group=0, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    ended = threading.Event()
    printed = []
    with _passed_on(process) as signals, process.stdout:
        ticking = threading.Thread(target=_tick, args=(ended, progress), daemon=True)
        ticking.start()
        try:
            for text in process.stdout:
                if progress.take(text) and is_shown:
                    print(text, end="", flush=True)
                printed.append(text)
            status = process.wait()
        finally:
            ended.set()
            ticking.join()
    return status, "".join(printed), signals[0] if signals and status else 0


def _tick(ended: threading.Event, progress: Progress) -> None:
    while not ended.wait(SECONDS):
        print(f"  {progress}", flush=True)


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen) -> Iterator[list[int]]:
    """Pass signals to end on to a process; the list gets their numbers."""
    signals: list[int] = []

    def note(number: int, frame: object) -> None:
        signals.append(number)
        process.send_signal(_SIGNALS[signal.Signals(number)])

    # A signal that is ignored, as under nohup, stays ignored.
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in handled}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
