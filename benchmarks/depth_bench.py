"""Times what reads the depth, shape after shape, and writes rows as soon as it has them."""

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.depth_layer import Layer
from benchmarks.depth_shapes import DEFAULT_SHAPES, FILE, JOINED, WHATS, Shape
from benchmarks.device import chosen_device, require_working
from benchmarks.profile import FILE as PROFILE_FILE
from benchmarks.profile import kernels, write_profile
from benchmarks.timing import Task, Timing, interleaved, is_out_of_memory, release_memory
from benchmarks.tracked import Run, append, resumed, rows_of, this_run

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the error of what reads both, by dtype."""


@dataclass(frozen=True)
class Row(Run):
    """One thing that was timed of one shape; both passes, medians in milliseconds, of the device alone on a GPU.

    Args:
        what: As in `WHATS`.
        status: "ok", "refused" by float64, "out of memory" or "failed".
        error: Against float64, of what reads both.
        kernel: What torch chose for the sequence, if it did.
        median_ms: Of the device on a GPU, of the clock on a CPU.
        host_ms: Until all was issued, on a GPU.
        wall_ms: Until all was done, on a GPU.
    """

    dtype: str
    tokens: int
    group: int
    slots: int
    what: str
    status: str
    error: float | None = None
    kernel: str | None = None
    median_ms: float | None = None
    host_ms: float | None = None
    wall_ms: float | None = None


def run(arguments: argparse.Namespace) -> int:
    """Measure what the command line asks for; returns 1 if something was wrong or failed."""
    with chosen_device(arguments) as device:
        return _run(arguments, device)


def _run(arguments: argparse.Namespace, device: str) -> int:
    began = time.perf_counter()
    chosen = arguments.shapes or DEFAULT_SHAPES["rehearsal" if arguments.rehearse else device]
    bench = Bench(arguments, device)
    for number, shape in enumerate(chosen):
        if arguments.budget is not None and time.perf_counter() - began > arguments.budget:
            _say(f"out of time; not measured: {', '.join(map(str, chosen[number:]))}")
            break
        bench.measure(shape)
        release_memory(device)
    for trouble in bench.troubles:
        _say(f"FAILED {trouble}")
    return 1 if bench.troubles else 0


class Bench:
    """Measures shapes, and writes rows as soon as it has them.

    Args:
        arguments: Of the command line.
        device: `"cpu"` or `"cuda"`.
    """

    def __init__(self, arguments: argparse.Namespace, device: str):
        self.arguments, self.device = arguments, device
        self.dtype = getattr(torch, arguments.dtype or ("bfloat16" if device == "cuda" else "float32"))
        self.whats: tuple[str, ...] = arguments.whats or WHATS[device]
        self.results = None if arguments.no_append else arguments.results / FILE
        self.run = this_run(device)
        self.there: dict[tuple[str, ...], str] = {}
        self.profiled: set[str] = set()
        self.troubles: list[str] = []
        if arguments.resume and self.results is not None:
            self.run = resumed(self.run, self.results)
            self.there = {
                tuple(row[name] for name in ("dtype", "tokens", "group", "slots", "what")): row["status"]
                for row in rows_of(self.run, self.results)
            }
            self.profiled = {row["subject"] for row in rows_of(self.run, arguments.results / PROFILE_FILE)}
        if device == "cuda":
            # A profiler leaves something behind that slows every later launch a little: all rows shall have it alike.
            kernels(lambda: None, device)

    def measure(self, shape: Shape) -> None:
        """Time what has no row yet."""
        before = {what: self.there.get(self._key(shape, what)) for what in self.whats}
        self.troubles += [
            f"{shape} {what}: {status} before" for what, status in before.items() if status in ("refused", "failed")
        ]
        wanted = [what for what, status in before.items() if status is None]
        if not wanted:
            _say(f"{shape}: measured before")
            return
        try:
            layer = Layer(shape, self.device, self.dtype)
        except Exception as error:
            for what in wanted:
                self._trouble(shape, what, error)
            return
        errors: dict[str, float | None] = {}
        tasks: dict[str, Task] = {}
        for what in wanted:
            try:
                errors[what] = layer.error(what) if what in JOINED else None
                if not self._is_right(shape, what, errors[what]):
                    continue
                tasks[what] = layer.task(what)
                tasks[what].run(None)
            except Exception as error:
                tasks.pop(what, None)
                self._trouble(shape, what, error)
        timings = self._timings(shape, tasks)
        rows = []
        for what, timing in timings.items():
            factor = layer.copies if what == "bound" else 1.0
            rows.append(
                self._row(
                    shape,
                    what,
                    "ok",
                    error=errors[what],
                    kernel=layer.chosen_kernel if what in ("usual", "merged") else None,
                    median_ms=factor * timing.median_ms,
                    host_ms=timing.host_ms,
                    wall_ms=timing.wall_ms,
                )
            )
            waited = "" if timing.queued else " (the device waited for its host)"
            _say(f"{shape} {what:13} {rows[-1].median_ms:10.3f} ms  {_further(rows[-1])}{waited}")
        self._append(*rows)
        for what in timings:
            self._profile(shape, what, tasks[what])

    def _timings(self, shape: Shape, tasks: dict[str, Task]) -> dict[str, Timing]:
        """Times of all tasks in turn; where one of them fails, as what just fitted into memory may, of each by itself."""
        if not tasks:
            return {}
        try:
            return interleaved(tasks, self.device, seconds=self.arguments.seconds)
        except Exception as error:
            _say(f"{shape}: each is timed by itself, after {type(error).__name__}: {_first_line(error)}")
        timings: dict[str, Timing] = {}
        for what, task in tasks.items():
            release_memory(self.device)
            try:
                timings |= interleaved({what: task}, self.device, seconds=self.arguments.seconds / len(tasks))
            except Exception as error:
                self._trouble(shape, what, error)
        return timings

    def _is_right(self, shape: Shape, what: str, error: float | None) -> bool:
        most = _TOLERANCE[self.dtype]
        if error is None or error <= most:
            return True
        message = f"{shape} {what}: differs from float64 by {error:.2e} (RMS ratio); at most {most:.0e} is right. It is not timed."
        self.troubles.append(message)
        _say(message)
        self._append(self._row(shape, what, "refused", error=error))
        return False

    def _profile(self, shape: Shape, what: str, task: Task) -> None:
        subject = f"depth {shape}, {what}"
        if not self.arguments.profile or self.results is None or what not in JOINED or subject in self.profiled:
            return
        try:
            found = kernels(lambda: task.run(None), self.device)
        except Exception as error:  # the times are good without it
            _say(f"{subject}: no profile, {type(error).__name__}: {_first_line(error)}")
            return
        write_profile(self.run, self.arguments.results, "depth", subject, found)

    def _trouble(self, shape: Shape, what: str, error: Exception) -> None:
        """Record what could not run: too little memory is a finding, anything else a failure."""
        full = is_out_of_memory(error)
        if full:
            _say(f"{shape} {what}: out of memory")
        else:
            self.troubles.append(f"{shape} {what}: {type(error).__name__}: {_first_line(error)}")
            _say(self.troubles[-1])
        self._append(self._row(shape, what, "out of memory" if full else "failed"))
        error.__traceback__ = None  # it holds the tensors of the frames it went through
        require_working(self.device)
        release_memory(self.device)

    def _key(self, shape: Shape, what: str) -> tuple[str, ...]:
        return (_name(self.dtype), str(shape.tokens), str(shape.group), str(shape.slots), what)

    def _row(self, shape: Shape, what: str, status: str, **measured: Any) -> Row:
        return Row(**asdict(self.run), dtype=_name(self.dtype), **asdict(shape), what=what, status=status, **measured)

    def _append(self, *rows: Row) -> None:
        if self.results is not None:
            append(rows, self.results)


def _further(row: Row) -> str:
    parts = [] if row.wall_ms is None else [f"host {row.host_ms:8.3f}  wall {row.wall_ms:8.3f}"]
    parts += [] if row.error is None else [f"error {row.error:.1e}"]
    return "  ".join(parts + ([] if row.kernel is None else [row.kernel]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
