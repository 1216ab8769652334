"""A run that keeps what it measures as soon as it is measured, goes on where it was cut off, and tells what went wrong."""

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
    """The rows of a run, and its troubles.

    Args:
        run: What all rows share.
        device: `"cpu"` or `"cuda"`.
        results: Folder of the CSV; None to keep nothing.
        file: Name of the CSV.
        goes_on: Whether the run was begun before. Default: false.
    """

    def __init__(self, run: Run, device: str, results: Path | None, file: str, goes_on: bool = False):
        self.run, self.device, self.results, self.file = run, device, results, file
        self.troubles: list[str] = []
        self.before: list[dict[str, str]] = self.rows() if goes_on else []
        """Rows that a run has which goes on."""
        self.profiled: set[str] = set()
        """Subjects of the profiles that it has."""
        if goes_on and results is not None:
            self.profiled |= {row["subject"] for row in rows_of(run, results / PROFILE_FILE)}

    @classmethod
    def begun(cls, device: str, results: Path | None, file: str, resume: bool) -> "Recorded":
        """Begin a run; one that shall go on is the newest in the CSV that is like it, if there is one."""
        run = this_run(device)
        if device == "cuda":
            # A profiler leaves something behind that slows every later launch a little: all rows shall have it alike.
            kernels(lambda: None, device)
        if not resume or results is None:
            return cls(run, device, results, file)
        return cls(resumed(run, results / file), device, results, file, goes_on=True)

    def rows(self) -> list[dict[str, str]]:
        """Return those that the run has."""
        return [] if self.results is None else rows_of(self.run, self.results / self.file)

    def append(self, *rows: Any) -> None:
        """Keep rows."""
        if self.results is not None:
            append(rows, self.results / self.file)

    def measure_all(self, cases: Sequence[Case], measure: Callable[[Case], None], budget: float | None) -> int:
        """Measure one case after the other while there is time; returns 1 if something was wrong or failed.

        Args:
            cases: What is measured, most important first.
            measure: Measures one of them.
            budget: Seconds after which no further one is begun; None for all.
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
        """Tell all troubles once more; returns 1 if there were any."""
        for trouble in self.troubles:
            say(f"FAILED {trouble}")
        return 1 if self.troubles else 0

    def timed(
        self, what: str, tasks: Mapping[str, Task], seconds: float, failed: Callable[[str, Exception], None]
    ) -> dict[str, Timing]:
        """Times of all tasks in turn; where one of them fails, as what just fitted into memory may, of each by itself.

        Args:
            what: All of them, in words.
            tasks: By name.
            seconds: For all of them together.
            failed: Is told the name and the error of a task that fails by itself.
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
        """Profile a run, keep what it launched, and return that.

        Where no profile can be taken nothing is kept or returned: times are good without it.

        Args:
            benchmark: As in `write_profile`.
            subject: What is profiled, in words.
            run: Returns the kernels.
            is_kept: Whether they are written down. Default: true.
        """
        try:
            found = run()
        except Exception as error:
            say(f"{subject}: no profile, {in_words(error)}")
            return []
        if is_kept and self.results is not None:
            write_profile(self.run, self.results, benchmark, subject, found)
        return found

    def trouble(self, message: str) -> None:
        """Note that something was wrong or failed."""
        self.troubles.append(message)
        say(message)

    def failed(self, subject: str, error: Exception, row_of: Callable[[str], Any]) -> None:
        """Record what could not run: too little memory is a finding, anything else a failure.

        Args:
            subject: What that is, in words.
            error: Why.
            row_of: Makes its row, of the status.

        Raises:
            SystemExit: If the device is lost.
        """
        status = status_of(error)
        if status == "failed":
            self.trouble(f"{subject}: {in_words(error)}")
        else:
            say(f"{subject}: {status}")
        self.append(row_of(status))
        self.recover(error)

    def recover(self, error: BaseException) -> None:
        """Give back what an error holds, and see that the device still computes.

        Raises:
            SystemExit: If it does not.
        """
        for one in _chain(error):
            one.__traceback__ = None  # it holds the tensors of the frames it went through
        require_working(self.device)
        release_memory(self.device)


def status_of(error: BaseException) -> str:
    """Return `"out of memory"` or `"failed"`; compilers and captures raise errors of their own where memory ran out."""
    return "out of memory" if any(map(is_out_of_memory, _chain(error))) else "failed"


def in_words(error: BaseException) -> str:
    """Return the type of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def say(message: str) -> None:
    """Tell whoever watches."""
    print(message, file=sys.stderr, flush=True)


def require_known(asked: Sequence[str] | None, known: Any, what: str, expected: str = "one") -> None:
    """See that all that is asked for is known.

    Raises:
        SystemExit: If it is not.
    """
    for name in asked or ():
        if name not in known:
            raise SystemExit(f"{what} is {name!r}; expected {expected} of {', '.join(known)}.")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
