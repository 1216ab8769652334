"""Run the steps of measurements on a GPU one after the other, each with a log and a time limit, and summarise them on one page."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import ROOT, sections
from benchmarks.report.rows import Record, groups, short, table
from benchmarks.tracked import read

STEPS = ["ceilings", "tests", "ops", "1b", "8b"]
FURTHER_STEPS = ["compiled", "sizes"]
METHODS = "base,llama-pro,opt-deus,midus-hml"
# Default time limit of a step.
SECONDS = 540

# Time between the start of a step's last case and the step's time limit.
_MARGIN_SECONDS = 60


@dataclass(frozen=True)
class Step:
    """Step of the measurements: a process in the root of the repository, and the question that the results answer, for people."""

    name: str
    command: list[str]
    teaches: str


@dataclass(frozen=True)
class Done:
    """End of a step: exit status, None if the step ran out of time, and the last lines that it printed, without blank ones."""

    step: Step
    status: int | None
    seconds: float
    last_lines: tuple[str, ...]


def steps(out: Path, seconds: int) -> list[Step]:
    """Return all steps, the most informative first."""
    budget = str(max(seconds - _MARGIN_SECONDS, seconds // 2))
    device = ["--device", "cuda"]
    common = [*device, "--resume", "--profile", "--budget", budget, "--results", str(out)]

    device_alone = [*device, "--results", str(out)]
    main = f"--methods {METHODS} --rounds 2"
    compiled = (
        "--methods llama-pro,midus-hml --rounds 1 --phases generate --decoding graph,compiled --generate-batches 1"
    )
    sizes = f"--methods {METHODS} --rounds 1 --phases train --batches 32 --lengths 512,1024,4096"
    listed = [
        ("ceilings", "benchmarks.gpu.ceilings", device_alone, "what a GPU can do at most"),
        ("tests", "pytest tests/ops -q", _NOT_FOR_THE_DEVICE, "whether the kernels are right"),
        ("ops", "benchmarks ops", common, "what ops take, beside the roofline and rivals"),
        ("1b", f"benchmarks model --base llama-3.2-1b {main}", common, "what a whole model takes"),
        ("8b", f"benchmarks model --base llama-3.1-8b {main}", common, "the same where kernels weigh most"),
        (
            "compiled",
            f"benchmarks model --base llama-3.1-8b,llama-3.2-1b {compiled}",
            common,
            "what compiling adds to a captured step",
        ),
        (
            "sizes",
            f"benchmarks model --base llama-3.2-1b,llama-3.1-8b {sizes}",
            common,
            "how a step grows with batch and length",
        ),
    ]
    return [
        Step(name, [sys.executable, "-m", *command.split(), *options], teaches)
        for name, command, options, teaches in listed
    ]


_NOT_FOR_THE_DEVICE = [
    *("-p", "no:cacheprovider", "--ignore", "tests/ops/kernels/test_offline_compilation.py"),
    # Without hypothesis, test files that import it fail to load, and all other tests must still run.
    "--continue-on-collection-errors",
]


# Number of a step's last printed lines in the summary.
_LAST_LINES = 15


def run(arguments: argparse.Namespace) -> int:
    """Run the steps that the command line names; return 1 if a step failed or ran out of time, else 0."""
    for name in arguments.steps:
        if name not in (*STEPS, *FURTHER_STEPS):
            raise SystemExit(f"step is {name!r}; expected some of {', '.join((*STEPS, *FURTHER_STEPS))}.")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    done: list[Done] = []
    for step in steps(out, arguments.seconds):
        if step.name in arguments.steps:
            done.append(run_step(step, out, arguments.seconds))
            write_summary(out, done)
    return 0 if all(one.status == 0 for one in done) else 1


def run_step(step: Step, out: Path, seconds: float) -> Done:
    """Run one step. Its output is shown at once and appended to `log.txt`."""
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
        with (out / "log.txt").open("a", encoding="utf-8") as log:
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


# Number of kernels that are shown per profile.
_HOTTEST = 8


def write_summary(out: Path, done: list[Done]) -> None:
    """Write `summary.md`."""
    made = sections(out)
    parts = [
        "# Measured on a GPU",
        _steps(done),
        *(_end_of_log(one) for one in done if one.status != 0),
        f"## Ceilings\n\n{_ceilings(read(out / 'ceilings.csv'))}",
        f"## Goals\n\n{made['goals']}",
        f"## Ops\n\n{made['ops']}",
        f"## Models\n\n{made['models']}",
        f"## Kernels\n\n{_profiles(read(out / 'profile.csv'))}",
    ]
    (out / "summary.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _steps(done: list[Done]) -> str:
    lines = []
    for one in done:
        last_line = one.last_lines[-1] if one.last_lines else ""
        lines.append([one.step.name, _ending(one), f"{one.seconds:.0f}", one.step.teaches, last_line])
    return table(["step", "ended", "seconds", "teaches", "last line"], lines)


def _ending(one: Done) -> str:
    if one.status is None:
        return "out of time"
    return "well" if one.status == 0 else f"with status {one.status}"


def _end_of_log(one: Done) -> str:
    return f"The end of what `{one.step.name}` printed:\n\n```\n" + "\n".join(one.last_lines) + "\n```"


def _ceilings(rows: list[Record]) -> str:
    if not rows:
        return "Not measured."
    last = max(row["date"] for row in rows)
    return table(
        ["what", "a second", "device"],
        [[row["what"], f"{float(row['per_second']):.3g}", row["device"]] for row in rows if row["date"] == last],
    )


def _profiles(rows: list[Record]) -> str:
    """Return a table of the slowest kernels of each profile, with their share of the profile's time."""
    if not rows:
        return "Not profiled."
    lines = []
    for (_, subject), of_profile in groups(rows, "benchmark", "subject").items():
        total = sum(float(row["device_us"]) for row in of_profile)
        launches = sum(int(row["launches"]) for row in of_profile)
        lines.append([f"**{subject}**", f"**{launches:,}**", f"**{short(str(total))}**", ""])
        for row in sorted(of_profile, key=lambda row: -float(row["device_us"]))[:_HOTTEST]:
            share = f"{float(row['device_us']) / total:.0%}" if total else ""
            lines.append([f"`{row['kernel'][:80]}`", row["launches"], short(row["device_us"]), share])
    return table(["profile and kernel", "launches", "us", "share"], lines)
