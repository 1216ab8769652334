"""Time tiles by kernel and case, write rows as soon as they are measured, and write the table of the faster tiles."""

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import chosen_device
from benchmarks.recorded import Recorded, in_words, require_known, say
from benchmarks.tiles.cases import Call, Case, cases
from benchmarks.tiles.trying import candidates, shape_of_call, trying
from benchmarks.timing import Task, Timing, interleaved, release_memory
from midus_hf.ops.dispatch.tiles import MEASURED, TILES, Changes, Measured, measured_tiles

FILE = "tiles.csv"
# Changes of the rule's own tile, as JSON: none.
USUAL = "{}"
_TIMES = ("median_ms", "p20_ms", "p80_ms")
# Largest RMS ratio to the result of the rule's tile, in bfloat16.
_TOLERANCE = 1e-2

# One tile of one kernel in one case. `shape` has the arguments of the rule and `changes` the differences from the
# rule's tile, both as JSON. `status` is "ok", "refused" if the result differs, or "failed", for example if a program
# is too large for the GPU. `error` is the RMS ratio to the result of the rule's tile. Times are of the device, on a
# CPU of the clock.
Row = dict[str, Any]


def run(arguments: argparse.Namespace) -> int:
    """Measure the tiles of the command line; return 1 if something went wrong, such as a result that differs from the rule's."""
    arguments.write = arguments.write and arguments.write.resolve()
    if arguments.rehearse and arguments.write == arguments.table:
        raise SystemExit("--rehearse measures nothing that kernels could go by; name another file with --write.")
    if arguments.write and arguments.no_append:
        raise SystemExit("--write reads the rows that --no-append leaves out; drop one of them.")
    with chosen_device(arguments) as device:
        return _run(arguments, device)


def _run(arguments: argparse.Namespace, device: str) -> int:
    chosen = list(cases(arguments.rehearse))
    require_known(arguments.cases, [case.name for case in chosen], "case", "some")
    require_known(arguments.kernels, list(TILES), "kernel", "some")
    bench = Bench(arguments, device)
    for case in chosen:
        if not arguments.cases or case.name in arguments.cases:
            bench.measure(case)
            release_memory(device)
    if bench.is_late and arguments.write == arguments.table:
        say(
            f"{arguments.table.name} is left as it is until all cases are timed, since a run of other code cannot be resumed"
        )
    elif arguments.write:
        written(arguments.write, bench.record.run.device, fastest(bench.record.rows()))
    return bench.record.ended()


class Bench:
    """A run that measures tiles and writes rows as soon as they are measured.

    Args:
        arguments: Arguments of the command line.
        device: `"cpu"` or `"cuda"`.
    """

    def __init__(self, arguments: argparse.Namespace, device: str):
        self.arguments, self.device = arguments, device
        results = None if arguments.no_append else arguments.results
        self.record = Recorded.begun(device, results, FILE, arguments.resume)
        self.measured_before = {(row["kernel"], row["case"]) for row in self.record.before}
        self.record.troubles += [
            f"{row['kernel']}, {row['case']}, {row['changes']}: {row['status']} before"
            for row in self.record.before
            if row["status"] == "refused" or (row["status"] == "failed" and row["changes"] == USUAL)
        ]
        self.began, self.is_late = time.perf_counter(), False

    def measure(self, case: Case) -> None:
        """Time the tiles of all kernels of a case that have no rows yet, while there is time."""
        torch.manual_seed(0)
        try:
            calls = {} if self._time_is_up(case.name) else case.build(self.device)
        except Exception as error:
            self._trouble(case.name, error)
            return
        for kernel, call in calls.items():
            is_wanted = (kernel, case.name) not in self.measured_before and kernel in (self.arguments.kernels or calls)
            if is_wanted and not self._time_is_up(f"{kernel}, {case.name}"):
                self._measure(kernel, case.name, call)

    def _time_is_up(self, before: str) -> bool:
        """Return whether the budget of time is spent, and say so once."""
        budget = self.arguments.budget
        if not self.is_late and budget is not None and time.perf_counter() - self.began > budget:
            self.is_late = True
            say(f"out of time before {before}; go on with --resume")
        return self.is_late

    def _measure(self, kernel: str, case: str, call: Call) -> None:
        tiles = TILES[kernel]
        try:
            shape = shape_of_call(tiles, call)
            expected = _numbers(self._called(kernel, {}, call))
        except Exception as error:
            self.record.append(self._row(kernel, case, (), USUAL, "failed"))
            self._trouble(f"{kernel}, {case}", error)
            return
        if shape is None:
            return  # on this GPU the call launches another kernel
        errors: dict[str, float] = {}
        tasks: dict[str, Task] = {}
        rows = []
        for changes in ({}, *candidates(tiles, *shape)):
            name = json.dumps(changes)
            try:
                errors[name] = self._error(kernel, changes, call, expected)
                tasks[name] = Task(lambda _, changes=changes: self._called(kernel, changes, call))
            except Exception as error:
                say(f"{kernel}, {case}, {name}: {in_words(error)}")
                rows.append(self._row(kernel, case, shape, name, "failed"))
                self.record.recover(error)
        for name, error in errors.items():
            if not error <= _TOLERANCE:
                del tasks[name]
                self.record.troubles.append(
                    f"{kernel}, {case}, {name}: differs from the rule's by {error:.1e} (RMS ratio)"
                )
                rows.append(self._row(kernel, case, shape, name, "refused", error=error))
        timings = interleaved(tasks, self.device, seconds=self.arguments.seconds)
        rows += [
            self._row(kernel, case, shape, name, "ok", error=errors[name], **_times(timing))
            for name, timing in timings.items()
        ]
        self.record.append(*rows)
        if USUAL in timings:
            usual, best = timings[USUAL].median_ms, min(timings, key=lambda name: timings[name].median_ms)
            share = timings[best].median_ms / usual
            say(f"{kernel:30s} {case:24s} rule {usual:9.4f} ms; {best} {share:.3f} of it, of {len(timings)}")

    def _trouble(self, what: str, error: Exception) -> None:
        self.record.trouble(f"{what}: {in_words(error)}")
        self.record.recover(error)

    def _called(self, kernel: str, changes: Changes, call: Call) -> object:
        with trying(TILES[kernel], changes):
            return call()

    def _error(self, kernel: str, changes: Changes, call: Call, expected: torch.Tensor) -> float:
        result = _numbers(self._called(kernel, changes, call))
        return float((result - expected).norm() / expected.norm())

    def _row(self, kernel: str, case: str, shape: tuple[Any, ...], changes: str, status: str, **measured: Any) -> Row:
        identity = {"kernel": kernel, "case": case, "shape": json.dumps(shape), "changes": changes, "status": status}
        unknown = dict.fromkeys(("error", *_TIMES))
        return {**asdict(self.record.run), **identity, **unknown, **measured}


def fastest(rows: Iterable[dict[str, str]]) -> dict[tuple[str, tuple[Any, ...]], Changes]:
    """Return, by kernel and shape, the changes of the fastest tile if it is clearly faster than the rule's tile, else no changes.

    A tile is clearly faster if its 80th percentile is below the 20th percentile of the rule's tile.
    """
    by_shape: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        if row["status"] == "ok":
            by_shape.setdefault((row["kernel"], row["shape"]), []).append(row)
    chosen: dict[tuple[str, tuple[Any, ...]], Changes] = {}
    for (kernel, shape), tiles in by_shape.items():
        usual = [float(row["p20_ms"]) for row in tiles if row["changes"] == USUAL]
        best = min(tiles, key=lambda row: float(row["median_ms"]))
        is_faster = usual and float(best["p80_ms"]) < min(usual)
        chosen[kernel, tuple(json.loads(shape))] = json.loads(best["changes"]) if is_faster else {}
    return chosen


def _numbers(result: object) -> torch.Tensor:
    """Return all numbers of the tensors that a call returned, flat and in float64."""
    parts = torch.utils._pytree.tree_leaves(result)
    return torch.cat([part.double().flatten() for part in parts if isinstance(part, torch.Tensor)])


def _times(timing: Timing) -> dict[str, float]:
    return {name: round(getattr(timing, name), 5) for name in _TIMES}


def written(table: Path, device: str, timed: Mapping[tuple[str, tuple[Any, ...]], Changes]) -> None:
    """Write a table of tiles, in which timed tiles replace known ones.

    Args:
        table: File to write. The known tiles are the tiles in the file, or if the file is missing, the tiles that kernels use.
        device: Name of the device that was timed.
        timed: Changes to the rule's tile, by kernel and shape; empty if the rule's tile is the fastest.
    """
    known = measured_tiles(table) if table.is_file() else MEASURED
    measured = {name: {kernel: dict(shapes) for kernel, shapes in of.items()} for name, of in known.items()}
    of_device = measured.setdefault(device, {})
    for (kernel, shape), changes in timed.items():
        of_device.setdefault(kernel, {})[shape] = dict(changes)
    table.write_text(source(measured), encoding="utf-8")


def source(measured: Measured) -> str:
    """Return the text of the file of tiles: one line per shape whose tile differs from the rule's."""
    devices = []
    for device, kernels in sorted(measured.items()):
        of_device = []
        for kernel, shapes in sorted(kernels.items()):
            changed = [
                f"   {json.dumps({'shape': shape, 'changes': dict(changes)})}"
                for shape, changes in shapes.items()
                if changes
            ]
            of_device += [f"  {json.dumps(kernel)}: [\n" + ",\n".join(changed) + "\n  ]"] if changed else []
        devices += [f" {json.dumps(device)}: {{\n" + ",\n".join(of_device) + "\n }"] if of_device else []
    return ("{\n" + ",\n".join(devices) + "\n}" if devices else "{}") + "\n"
