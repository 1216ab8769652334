"""Time attention to the depth at one shape after the other, and write each row as soon as it is measured."""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.depth_cost.layer import Layer
from benchmarks.depth_cost.shapes import DEFAULT_SHAPES, FILE, JOINED, WHATS, Shape
from benchmarks.device import chosen_device
from benchmarks.profile import kernels
from benchmarks.recorded import Recorded, say
from benchmarks.timing import Task
from benchmarks.tracked import Run

# Largest accepted error of a way that reads sequence and depth, by dtype.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Row(Run):
    """Row of `depth_cost.csv`: one way at one shape, forward and backward pass, medians in milliseconds.

    Args:
        what: Name of the way, see `WHATS` and `JOINED`.
        status: "ok", "refused" if the way disagrees with float64, "out of memory" or "failed".
        error: Error against float64 of a way that reads sequence and depth. Default: None.
        kernel: Kernel that torch chose for the sequence. Default: None, torch did not choose.
        median_ms: Time of the device on a GPU, wall time on a CPU.
        host_ms: Time until the host had issued all work, on a GPU. Default: None, on a CPU.
        wall_ms: Time until all work was done, on a GPU. Default: None, on a CPU.
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
    with chosen_device(arguments) as device:
        return _run(arguments, device)


def _run(arguments: argparse.Namespace, device: str) -> int:
    chosen = arguments.shapes or DEFAULT_SHAPES["rehearsal" if arguments.rehearse else device]
    bench = Bench(arguments, device)
    return bench.record.measure_all(chosen, bench.measure, arguments.budget)


class Bench:
    """Measurements of shapes, whose rows are stored as soon as they are measured.

    Args:
        arguments: Parsed arguments of the command line.
        device: `"cpu"` or `"cuda"`.
    """

    def __init__(self, arguments: argparse.Namespace, device: str):
        self.arguments, self.device = arguments, device
        self.dtype = getattr(torch, arguments.dtype or ("bfloat16" if device == "cuda" else "float32"))
        self.whats: tuple[str, ...] = arguments.whats or WHATS[device]
        results = None if arguments.no_append else arguments.results
        self.record = Recorded.begun(device, results, FILE, arguments.resume)
        self.earlier_statuses = {
            tuple(row[name] for name in ("dtype", "tokens", "group", "slots", "what")): row["status"]
            for row in self.record.before
        }

    def measure(self, shape: Shape) -> None:
        """Time the ways at a shape that have no row yet."""
        before = {what: self.earlier_statuses.get(self._key(shape, what)) for what in self.whats}
        self.record.troubles += [
            f"{shape} {what}: {status} before" for what, status in before.items() if status in ("refused", "failed")
        ]
        wanted = [what for what, status in before.items() if status is None]
        if not wanted:
            say(f"{shape}: measured before")
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

        def failed(what: str, error: Exception) -> None:
            self._trouble(shape, what, error)

        timings = self.record.timed(str(shape), tasks, self.arguments.seconds, failed)
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
            say(f"{shape} {what:13} {rows[-1].median_ms:10.3f} ms  {_further(rows[-1])}{waited}")
        self.record.append(*rows)
        for what in timings:
            self._profile(shape, what, tasks[what])

    def _is_right(self, shape: Shape, what: str, error: float | None) -> bool:
        most = _TOLERANCE[self.dtype]
        if error is None or error <= most:
            return True
        finding = f"differs from float64 by {error:.2e} (RMS ratio); at most {most:.0e} is right"
        self.record.trouble(f"{shape} {what}: {finding}. It is not timed.")
        self.record.append(self._row(shape, what, "refused", error=error))
        return False

    def _profile(self, shape: Shape, what: str, task: Task) -> None:
        subject = f"depth {shape}, {what}"
        if self.arguments.profile and self.record.results and what in JOINED and subject not in self.record.profiled:
            self.record.profile("depth", subject, lambda: kernels(lambda: task.run(None), self.device))

    def _trouble(self, shape: Shape, what: str, error: Exception) -> None:
        self.record.failed(f"{shape} {what}", error, lambda status: self._row(shape, what, status))

    def _key(self, shape: Shape, what: str) -> tuple[str, ...]:
        return (_name(self.dtype), str(shape.tokens), str(shape.group), str(shape.slots), what)

    def _row(self, shape: Shape, what: str, status: str, **measured: Any) -> Row:
        return Row(
            **asdict(self.record.run), dtype=_name(self.dtype), **asdict(shape), what=what, status=status, **measured
        )


def _further(row: Row) -> str:
    parts = [] if row.wall_ms is None else [f"host {row.host_ms:8.3f}  wall {row.wall_ms:8.3f}"]
    parts += [] if row.error is None else [f"error {row.error:.1e}"]
    return "  ".join(parts + ([] if row.kernel is None else [row.kernel]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
