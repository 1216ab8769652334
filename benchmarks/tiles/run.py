"""Time tiles by kernel and case, write rows as soon as they are measured, and write the table of the faster tiles."""

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.pretended_gpu import chosen_device
from benchmarks.recorded import Recorded, in_words, require_known, say
from benchmarks.tiles.cases import Call, Case, cases
from benchmarks.tiles.trying import candidates, shape_of_call, trying
from benchmarks.timing import Task, interleaved
from midus_hf.ops.dispatch.tiles import MEASURED, TILES, Changes, Measured, measured_tiles

FILE = "tiles.csv"
# Changes of the rule's own tile, as JSON: none.
USUAL = "{}"
_TIMES = ("median_ms", "p20_ms", "p80_ms")
# Largest RMS ratio to the result of the rule's tile, in bfloat16.
_TOLERANCE = 1e-2

# One tile of one kernel in one case. `shape` has the arguments of the rule and `changes` the differences from the rule's tile, both
# as JSON. `status` is "ok", "refused" if the result differs, "failed" if the rule's own tile cannot run, or "too large" if another
# one cannot, for example on a GPU with too little shared memory. `error` is the RMS ratio to the result of the rule's tile. Times
# are of the device, on a CPU of the clock.
Row = dict[str, Any]


def run(arguments: argparse.Namespace) -> int:
    """Measure the tiles of the command line; return 1 if something went wrong, such as a result that differs from the rule's."""
    arguments.write = arguments.write and arguments.write.resolve()
    if arguments.rehearse and arguments.write == arguments.table:
        raise SystemExit("--rehearse measures nothing that kernels could go by; name another file with --write.")
    if arguments.write and arguments.no_append:
        raise SystemExit("--write reads the rows that --no-append leaves out; drop one of them.")
    with chosen_device(arguments) as device:
        known = {case.name: case for case in cases(arguments.rehearse)}
        require_known(arguments.cases, known, "case", "some")
        require_known(arguments.kernels, TILES, "kernel", "some")
        bench = Bench(arguments, device)
        chosen = [case for name, case in known.items() if name in (arguments.cases or known)]
        status = bench.record.measure_all(chosen, bench.measure, arguments.budget)
        if bench.record.is_late and arguments.write == arguments.table:
            say(
                f"{arguments.table.name} is left as it is until all cases are timed, since a run of other code cannot be resumed"
            )
        elif arguments.write:
            written(arguments.write, bench.record.run.device, fastest(bench.record.rows()))
        return status


class Bench:
    """A run that measures tiles and writes rows as soon as they are measured."""

    def __init__(self, arguments: argparse.Namespace, device: str):
        self.arguments, self.device = arguments, device
        results = None if arguments.no_append else arguments.results
        self.record = Recorded(device, results, FILE, ("kernel", "case", "changes"), arguments.resume)

    def measure(self, case: Case) -> None:
        """Time the tiles of all kernels of a case that have no rows yet."""
        torch.manual_seed(0)
        try:
            calls = case.build(self.device)
        except Exception as error:
            self._failed(case.name, error)
            return
        for kernel, call in calls.items():
            is_new = (kernel, case.name, USUAL) not in self.record.measured
            if is_new and kernel in (self.arguments.kernels or calls):
                self._measure(kernel, case.name, call)

    def _measure(self, kernel: str, case: str, call: Call) -> None:
        tiles = TILES[kernel]

        def called(changes: Changes) -> object:
            with trying(tiles, changes):
                return call()

        def row(changes: str, status: str, **measured: Any) -> Row:
            unknown = dict.fromkeys(("error", *_TIMES))
            sizes = json.dumps(shape or ())
            subject = {"kernel": kernel, "case": case, "shape": sizes, "changes": changes, "status": status}
            return {**asdict(self.record.run), **subject, **unknown, **measured}

        shape: tuple[Any, ...] | None = None
        try:
            shape = shape_of_call(tiles, call)
            expected = _numbers(called({}))
        except Exception as error:
            self.record.append(row(USUAL, "failed"))
            self._failed(f"{kernel}, {case}", error)
            return
        if shape is None:
            return  # on this GPU the call launches another kernel
        errors: dict[str, float] = {}
        tasks: dict[str, Task] = {}
        rows = []
        for changes in ({}, *candidates(tiles, *shape)):
            name = json.dumps(changes)
            try:
                errors[name] = float((_numbers(called(changes)) - expected).norm() / expected.norm())
            except Exception as error:
                say(f"{kernel}, {case}, {name}: {in_words(error)}")
                rows.append(row(name, "too large"))
                self.record.recover(error)
                continue
            if errors[name] <= _TOLERANCE:
                tasks[name] = Task(lambda _, changes=changes: called(changes))
            else:
                message = f"{kernel}, {case}, {name}: differs from the rule's by {errors[name]:.1e} (RMS ratio)"
                self.record.troubles.append(message)
                rows.append(row(name, "refused", error=errors[name]))
        timings = interleaved(tasks, self.device, seconds=self.arguments.seconds)
        for name, timing in timings.items():
            times = {column: round(getattr(timing, column), 5) for column in _TIMES}
            rows.append(row(name, "ok", error=errors[name], **times))
        self.record.append(*rows)
        if USUAL in timings:
            usual, best = timings[USUAL].median_ms, min(timings, key=lambda name: timings[name].median_ms)
            share = timings[best].median_ms / usual
            say(f"{kernel:30s} {case:24s} rule {usual:9.4f} ms; {best} {share:.3f} of it, of {len(timings)}")

    def _failed(self, what: str, error: Exception) -> None:
        self.record.trouble(f"{what}: {in_words(error)}")
        self.record.recover(error)


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


def written(table: Path, device: str, timed: Mapping[tuple[str, tuple[Any, ...]], Changes]) -> None:
    """Write a table of tiles: known tiles of the file, or without a file of kernels, and over these the timed tiles of a device."""
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
