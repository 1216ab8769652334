"""A run that stores each measurement at once, resumes where an earlier run stopped, and reports failures."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.timing import (
    PROFILES,
    KernelTime,
    Task,
    Timing,
    interleaved,
    is_out_of_memory,
    kernels,
    release_memory,
    write_profile,
)
from benchmarks.tracked import Run, append, resumed, rows_of, this_run

Case = TypeVar("Case")


class Recorded:
    """Rows and failures of a run.

    Args:
        device: `"cpu"` or `"cuda"`.
        results: Folder of the CSV; None to store nothing.
        file: Name of the CSV.
        identity: Columns that tell a row from the run's other rows.
        resume: Whether to resume the newest run in the CSV with equal commit, machine, device and versions, if there is one.
            Default: False.
        run: Columns that all rows share. Default: a run that begins now.
    """

    def __init__(
        self,
        device: str,
        results: Path | None,
        file: str,
        identity: Sequence[str],
        resume: bool = False,
        run: Run | None = None,
    ):
        self.device, self.results, self.file, self.identity = device, results, file, identity
        self.run = run or this_run(device)
        # Rows and subjects of profiles that a resumed run already has.
        self.before: list[dict[str, str]] = []
        self.profiled: set[str] = set()
        if device == "cuda":
            # Every launch after a profile is a little slower, so a profile comes first, which slows all rows alike.
            kernels(lambda: None, device)
        if resume and results is not None:
            self.run = resumed(self.run, results / file)
            self.before = self.rows()
            self.profiled = {row["subject"] for row in rows_of(self.run, results / PROFILES)}
            how = f"goes on with the run of {self.run.date}, which has {len(self.before)} rows"
            say(how if self.before else "no run to go on with")
        # Whether `measure_all` left out cases for lack of time.
        self.is_late = False
        self.measured = set(map(self.key, self.before))
        self.troubles = [
            f"{' '.join(self.key(row))}: {row['status']} before"
            for row in self.before
            if row["status"] in ("refused", "failed")
        ]

    def key(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the identity of a row, as text."""
        return tuple(str(values[name]) for name in self.identity)

    def rows(self) -> list[dict[str, str]]:
        """Return the rows that the run has in its CSV, as text."""
        return [] if self.results is None else rows_of(self.run, self.results / self.file)

    def append(self, *rows: Any) -> None:
        """Append rows to the CSV, if the run stores any."""
        if self.results is not None:
            append(rows, self.results / self.file)

    def measure_all(self, cases: Sequence[Case], measure: Callable[[Case], None], budget: float | None) -> int:
        """Measure one case after the other until `budget` seconds are spent; return 1 if something was wrong or failed, else 0."""
        began = time.perf_counter()
        for number, case in enumerate(cases):
            if budget is not None and time.perf_counter() - began > budget:
                self.is_late = True
                say(f"out of time; not measured: {', '.join(map(str, cases[number:]))}")
                break
            measure(case)
            release_memory(self.device)
        return self.ended()

    def ended(self) -> int:
        """Report all failures once more; return 1 if any was recorded, else 0."""
        for trouble in self.troubles:
            say(f"FAILED {trouble}")
        return 1 if self.troubles else 0

    def timed(
        self, what: str, tasks: Mapping[str, Task], seconds: float, failed: Callable[[str, Exception], None]
    ) -> dict[str, Timing]:
        """Time all tasks in turns; return the timings of the tasks that succeeded, by name.

        If a task fails, for example because memory runs out, each task is timed alone, and `failed` is called with the name and
        the error of a task that fails alone.
        """
        if not tasks:
            return {}
        try:
            return interleaved(tasks, self.device, seconds=seconds)
        except Exception as error:
            say(f"{what}: each is timed by itself, after {in_words(error)}")
        timings: dict[str, Timing] = {}
        for name, task in tasks.items():
            release_memory(self.device)
            try:
                timings |= interleaved({name: task}, self.device, seconds=seconds / len(tasks))
            except Exception as error:
                failed(name, error)
        return timings

    def profile(
        self, benchmark: str, subject: str, run: Callable[[], list[KernelTime]], is_kept: bool = True
    ) -> list[KernelTime]:
        """Profile a run, store its kernels if `is_kept`, and return them. If profiling fails, return an empty list."""
        try:
            kernel_times = run()
        except Exception as error:
            say(f"{subject}: no profile, {in_words(error)}")
            return []
        if is_kept and self.results is not None:
            write_profile(self.run, self.results, benchmark, subject, kernel_times)
        return kernel_times

    def trouble(self, message: str) -> None:
        """Record and print a wrong result or a failure."""
        self.troubles.append(message)
        say(message)

    def failed(self, subject: str, error: Exception, row_of: Callable[[str], Any]) -> None:
        """Record work that could not run, with a row from its status. Too little memory is a result; other errors are failures."""
        status = status_of(error)
        if status == "failed":
            self.trouble(f"{subject}: {in_words(error)}")
        else:
            say(f"{subject}: {status}")
        self.append(row_of(status))
        self.recover(error)

    def recover(self, error: BaseException) -> None:
        """Free the memory that an error holds, and check that the device still computes.

        A read outside of memory or a broken capture spoils a GPU for the whole process: every later call fails as well, and the
        rows of these failures would keep a resumed run from measuring the cases.

        Raises:
            SystemExit: If the device can no longer compute.
        """
        for one in _chain(error):
            one.__traceback__ = None  # a traceback holds the tensors of its frames
        if self.device == "cuda":
            try:
                torch.randint(2, (1,), device=self.device).item()  # after a broken capture, random numbers fail
            except RuntimeError as broken:
                line = (str(broken).splitlines() or [""])[0]
                raise SystemExit(f"the GPU is of no more use to this process ({line}); go on with --resume.") from None
        release_memory(self.device)


def status_of(error: BaseException) -> str:
    """Return `"out of memory"` if an error or one of its causes says so, else `"failed"`.

    The causes count because compilers and captures raise their own errors when memory runs out.
    """
    return "out of memory" if any(map(is_out_of_memory, _chain(error))) else "failed"


def in_words(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def say(message: str) -> None:
    """Print a message to stderr at once."""
    print(message, file=sys.stderr, flush=True)


def require_known(names: Sequence[str] | None, known: Any, what: str, expected: str = "one") -> None:
    """End the program if a name is not known."""
    for name in names or ():
        if name not in known:
            raise SystemExit(f"{what} is {name!r}; expected {expected} of {', '.join(known)}.")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
