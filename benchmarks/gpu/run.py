"""Run the steps one after the other, each with a log and a time limit."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

from benchmarks.gpu.steps import FURTHER_STEPS, STEPS, Done, Step, steps
from benchmarks.gpu.summary import write_summary

LOG = "log.txt"
# Number of a step's last printed lines in the summary.
_LAST_LINES = 15
ROOT = Path(__file__).parent.parent.parent


def run(arguments: argparse.Namespace) -> int:
    """Run the steps that the command line names; return 1 if a step failed or ran out of time, else 0.

    Raises:
        SystemExit: If a step is unknown.
    """
    for name in arguments.steps:
        if name not in (*STEPS, *FURTHER_STEPS):
            raise SystemExit(f"step is {name!r}; expected some of {', '.join((*STEPS, *FURTHER_STEPS))}.")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    done: list[Done] = []
    for step in steps(out, arguments.seconds, arguments.rehearse):
        if step.name in arguments.steps:
            done.append(run_step(step, out, arguments.seconds))
            write_summary(out, done, arguments.rehearse)
    return 0 if all(one.status == 0 for one in done) else 1


def run_step(step: Step, out: Path, seconds: float) -> Done:
    """Run one step. Its output is shown at once and appended to `log.txt`.

    Args:
        step: Step to run.
        out: Folder of the log.
        seconds: Time limit, after which the step and all its child processes are killed.
    """
    print(f"{step.name}: {' '.join(step.command)}", file=sys.stderr, flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        _kill(process)

    timer = threading.Timer(seconds, end)
    timer.start()
    last_lines: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        with (out / LOG).open("a", encoding="utf-8") as log:
            log.write(f"{step.name}: {' '.join(step.command)}\n")
            for line in process.stdout:
                log.write(line)
                log.flush()
                print(line, end="", file=sys.stderr, flush=True)
                if line.strip():
                    last_lines.append(line.rstrip())
        status = process.wait()
    finally:
        timer.cancel()
        _kill(process)
    return Done(step, None if is_late.is_set() else status, time.monotonic() - began, tuple(last_lines))


def _kill(process: subprocess.Popen) -> None:
    """End a process and its children, which form their own process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
