"""A run that stores each measurement at once, resumes where an earlier run stopped, and reports failures."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.device import require_working
from benchmarks.profile import FILE as PROFILE_FILE
from benchmarks.profile import KernelTime, kernels, write_profile
from benchmarks.timing import Task, Timing, interleaved, is_out_of_memory, release_memory
from benchmarks.tracked import Run, append, resumed, rows_of, this_run

Case = TypeVar("Case")


class Recorded:
    """Rows and failures of a run.

    Args:
        run: Columns that all rows share.
        device: `"cpu"` or `"cuda"`.
        results: Folder of the CSV; None to store nothing.
        file: Name of the CSV.
        goes_on: Whether to resume an earlier run. Default: False.
    """

    def __init__(self, run: Run, device: str, results: Path | None, file: str, goes_on: bool = False):
        self.run, self.device, self.results, self.file = run, device, results, file
        self.troubles: list[str] = []
        # Rows that a resumed run already has.
        self.before: list[dict[str, str]] = self.rows() if goes_on else []
        # Subjects of the profiles that a resumed run already has.
        self.profiled: set[str] = set()
        if goes_on and results is not None:
            self.profiled |= {row["subject"] for row in rows_of(run, results / PROFILE_FILE)}

    @classmethod
    def begun(cls, device: str, results: Path | None, file: str, resume: bool) -> "Recorded":
        """Begin a run, or resume the newest run in the CSV with equal commit, machine, device and versions.

        Args:
            device: `"cpu"` or `"cuda"`.
            results: Folder of the CSV; None to store nothing.
            file: Name of the CSV.
            resume: Whether to resume. Without a matching run a new one begins.
        """
        run = this_run(device)
        if device == "cuda":
            # Every launch after a profile is a little slower, so a profile comes first, which slows all rows alike.
            kernels(lambda: None, device)
        if not resume or results is None:
            return cls(run, device, results, file)
        return cls(resumed(run, results / file), device, results, file, goes_on=True)

    def rows(self) -> list[dict[str, str]]:
        """Return the rows that the run has in its CSV, as text."""
        return [] if self.results is None else rows_of(self.run, self.results / self.file)

    def append(self, *rows: Any) -> None:
        """Append rows to the CSV, if the run stores any."""
        if self.results is not None:
            append(rows, self.results / self.file)

    def measure_all(self, cases: Sequence[Case], measure: Callable[[Case], None], budget: float | None) -> int:
        """Measure one case after the other while time is left; return 1 if a result was wrong or a measurement failed, else 0.

        Args:
            cases: Cases to measure, most important first.
            measure: Function that measures a case.
            budget: Seconds after which no further case begins; None for no limit.
        """
        began = time.perf_counter()
        for number, case in enumerate(cases):
            if budget is not None and time.perf_counter() - began > budget:
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
        """Time all tasks in turns. If a task fails, for example because memory runs out, time each task alone.

        Args:
            what: Name of all tasks together, for messages.
            tasks: Tasks by name.
            seconds: Time for all tasks together.
            failed: Called with the name and the error of a task that fails alone.

        Returns:
            Timings by name, of the tasks that succeeded.
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
        """Profile a run, store its kernels and return them. If profiling fails, return an empty list.

        Args:
            benchmark: Name of the benchmark, such as `"ops"` or `"model"`.
            subject: Name of the profiled work, for people.
            run: Function that profiles and returns the kernels.
            is_kept: Whether to store the kernels. Default: True.
        """
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
        """Record work that could not run. Too little memory is a result; any other error counts as a failure.

        Args:
            subject: Name of the work, for messages.
            error: Error that ended the work.
            row_of: Function that makes a row from the status.

        Raises:
            SystemExit: If the device can no longer compute.
        """
        status = status_of(error)
        if status == "failed":
            self.trouble(f"{subject}: {in_words(error)}")
        else:
            say(f"{subject}: {status}")
        self.append(row_of(status))
        self.recover(error)

    def recover(self, error: BaseException) -> None:
        """Free the memory that an error holds, and check that the device still computes.

        Raises:
            SystemExit: If the device can no longer compute.
        """
        for one in _chain(error):
            one.__traceback__ = None  # a traceback holds the tensors of its frames
        require_working(self.device)
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
    """Check that all names are known.

    Args:
        names: Names to check; None for none.
        known: Collection of known names.
        what: Singular noun for a name, for the message.
        expected: Word in front of the known names in the message. Default: `"one"`.

    Raises:
        SystemExit: If a name is unknown.
    """
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
