"""Time attention to the depth at one shape after the other, and write each row as soon as it is measured."""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.depth_cost.layer import Layer
from benchmarks.depth_cost.shapes import DEFAULT_SHAPES, FILE, JOINED, WHATS, Shape
from benchmarks.options import chosen_device
from benchmarks.recorded import Recorded, say
from benchmarks.timing import Task, kernels
from benchmarks.tracked import Run

# Largest accepted error of a way that reads sequence and depth, by dtype.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Row(Run):
    """Row of `depth_cost.csv`: one way at one shape, forward and backward pass, medians in milliseconds.

    `what` is the name of the way, see `WHATS` and `JOINED`. `status` is "ok", "refused" if the way disagrees with float64, "out of
    memory" or "failed". `error` is against float64, of a way that reads sequence and depth, and `kernel` the kernel that torch
    chose for the sequence, where torch chooses. `median_ms` is the time of the device on a GPU, wall time on a CPU; `host_ms`,
    until the host had issued all work, and `wall_ms` are of a GPU.
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
    """Measure what the command line requests; return 1 if a result was wrong or a measurement failed, else 0."""
    device = chosen_device(arguments)
    chosen = arguments.shapes or DEFAULT_SHAPES[device]
    bench = Bench(arguments, device)
    return bench.record.measure_all(chosen, bench.measure, arguments.budget)


class Bench:
    """Measurements of shapes, whose rows are stored as soon as they are measured."""

    def __init__(self, arguments: argparse.Namespace, device: str):
        self.arguments, self.device = arguments, device
        self.dtype = arguments.dtype or ("bfloat16" if device == "cuda" else "float32")
        self.whats: tuple[str, ...] = arguments.whats or WHATS[device]
        results = None if arguments.no_append else arguments.results
        identity = ("dtype", "tokens", "group", "slots", "what")
        self.record = Recorded(device, results, FILE, identity, arguments.resume)

    def measure(self, shape: Shape) -> None:
        """Time the ways at a shape that have no row yet."""
        keys = {what: self.record.key({"dtype": self.dtype, **asdict(shape), "what": what}) for what in self.whats}
        wanted = [what for what, key in keys.items() if key not in self.record.measured]
        if not wanted:
            say(f"{shape}: measured before")
            return
        try:
            layer = Layer(shape, self.device, getattr(torch, self.dtype))
        except Exception as error:
            for what in wanted:
                self._failed(shape, what, error)
            return
        errors: dict[str, float | None] = {}
        tasks: dict[str, Task] = {}
        for what in wanted:
            try:
                errors[what] = layer.error(what) if what in JOINED else None
                if self._is_right(shape, what, errors[what]):
                    task = layer.task(what)
                    task.run(None)
                    tasks[what] = task
            except Exception as error:
                self._failed(shape, what, error)

        def failed(what: str, error: Exception) -> None:
            self._failed(shape, what, error)

        timings = self.record.timed(str(shape), tasks, self.arguments.seconds, failed)
        for what, timing in timings.items():
            row = self._row(
                shape,
                what,
                "ok",
                error=errors[what],
                kernel=layer.chosen_kernel if what in ("usual", "merged") else None,
                median_ms=(layer.copies if what == "bound" else 1.0) * timing.median_ms,
                host_ms=timing.host_ms,
                wall_ms=timing.wall_ms,
            )
            self.record.append(row)
            waited = "" if timing.queued else " (the device waited for its host)"
            say(f"{shape} {what:13} {row.median_ms:10.3f} ms  {_further(row)}{waited}")
        for what in timings:
            subject = f"depth {shape}, {what}"
            is_wanted = self.arguments.profile and self.record.results and subject not in self.record.profiled
            if is_wanted and what in JOINED:
                self.record.profile(
                    "depth", subject, lambda what=what: kernels(lambda: tasks[what].run(None), self.device)
                )

    def _is_right(self, shape: Shape, what: str, error: float | None) -> bool:
        most = _TOLERANCE[self.dtype]
        if error is None or error <= most:
            return True
        difference = f"differs from float64 by {error:.2e} (RMS ratio); at most {most:.0e} is right"
        self.record.trouble(f"{shape} {what}: {difference}. It is not timed.")
        self.record.append(self._row(shape, what, "refused", error=error))
        return False

    def _failed(self, shape: Shape, what: str, error: Exception) -> None:
        self.record.failed(f"{shape} {what}", error, lambda status: self._row(shape, what, status))

    def _row(self, shape: Shape, what: str, status: str, **measured: Any) -> Row:
        return Row(**asdict(self.record.run), dtype=self.dtype, **asdict(shape), what=what, status=status, **measured)


def _further(row: Row) -> str:
    parts = [] if row.wall_ms is None else [f"host {row.host_ms:8.3f}  wall {row.wall_ms:8.3f}"]
    parts += [] if row.error is None else [f"error {row.error:.1e}"]
    return "  ".join(parts + ([] if row.kernel is None else [row.kernel]))
