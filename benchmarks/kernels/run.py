"""Compile every launch for every target, and print the resources of each."""

import argparse
import json
import sys
from dataclasses import asdict

from benchmarks.kernels.cases import cases, launches
from benchmarks.kernels.compilation import Compiled, compile_for
from benchmarks.kernels.targets import MOST_SHARED_MEMORY


def run(arguments: argparse.Namespace) -> int:
    """Compile the launches of the command line; return 1 if a kernel needs more shared memory than its target has, else 0."""
    _known(arguments.targets, list(MOST_SHARED_MEMORY), "target")
    chosen_cases = _known(arguments.cases, sorted({name for name, _ in cases()}), "case")
    caught = launches(chosen_cases, arguments.candidates)
    of_kernels = _known(arguments.kernels, sorted({launch.kernel.__name__ for launch in caught}), "kernel")
    with_counts = _known(arguments.count, sorted(chosen_cases), "case")
    rows = []
    for launch in caught:
        if launch.kernel.__name__ not in of_kernels:
            continue
        for target in arguments.targets:
            row = compile_for(launch, target, counts=launch.case in with_counts)
            rows.append(row)
            if not arguments.json:
                print(_line(row), flush=True)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    too_large = [row for row in rows if row.shared_bytes > MOST_SHARED_MEMORY[row.target]]
    if too_large:
        print(
            f"{len(too_large)} kernels need more shared memory than their target has, {too_large[0]} among them.",
            file=sys.stderr,
        )
    return 1 if too_large else 0


def _known(chosen: list[str] | None, names: list[str], what: str) -> set[str]:
    """Return the chosen names, or all names if none are chosen; exit with a message if a chosen name is unknown."""
    if unknown := sorted(set(chosen or ()) - set(names)):
        raise SystemExit(f"no {what} {', '.join(unknown)}; expected some of {', '.join(names)}.")
    return set(names if chosen is None else chosen)


def _line(row: Compiled) -> str:
    line = f"{row.kernel:28s} {row.case:40s} {row.target:7s} {row.shared_bytes:7d} B shared"
    if row.registers is not None:
        line += f" {row.registers:4d} registers {row.spilled_bytes:4d} B stack"
    counts = row.instructions
    if counts is None:
        return line
    line += f"  {counts.all:6d} instructions"
    line += f" ({counts.alu} ALU, {counts.tensor_core} tensor core, {counts.memory} memory, {counts.loops} loops)"
    return line if row.floor_us is None else f"{line}  {row.floor_us:.0f} us at least on an H200"
