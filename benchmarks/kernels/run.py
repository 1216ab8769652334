"""Compile every launch for every target, and print the resources of each."""

import argparse
import json
import sys
from dataclasses import asdict

from benchmarks.kernels.bounds import MOST_SHARED_MEMORY
from benchmarks.kernels.cases import cases, launches
from benchmarks.kernels.compilation import Compiled, compile_for
from benchmarks.recorded import require_known


def run(arguments: argparse.Namespace) -> int:
    """Compile the launches of the command line; return 1 if a kernel needs more shared memory than its target has, else 0."""
    require_known(arguments.targets, MOST_SHARED_MEMORY, "target", "some")
    names = [name for name, _ in cases()]
    require_known(arguments.cases, names, "case", "some")
    chosen_cases = arguments.cases or names
    require_known(arguments.count, chosen_cases, "case", "some")
    with_counts = chosen_cases if arguments.count is None else arguments.count
    caught = launches(chosen_cases)
    kernels = dict.fromkeys(launch.kernel.__name__ for launch in caught)
    require_known(arguments.kernels, kernels, "kernel", "some")
    rows = []
    for launch in caught:
        if launch.kernel.__name__ not in (arguments.kernels or kernels):
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
