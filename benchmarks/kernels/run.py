"""Compile every launch for every target, and print what each needs."""

import json
import sys
from dataclasses import asdict

from benchmarks.kernels.cases import launches
from benchmarks.kernels.compilation import compile_for
from benchmarks.kernels.targets import MOST_SHARED_MEMORY


def run(targets: list[str], as_json: bool) -> int:
    """Returns 1 if a kernel needs more shared memory than its target has."""
    rows = []
    for launch in launches():
        for target in targets:
            row = compile_for(launch, target)
            rows.append(row)
            if not as_json:
                registers = (
                    "  -" if row.registers is None else f"{row.registers:3d} registers, {row.spilled_bytes} B stack"
                )
                print(
                    f"{row.kernel:24s} {row.case:44s} {row.target:7s} {row.shared_bytes:7d} B shared {registers}",
                    flush=True,
                )
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    too_large = [row for row in rows if row.shared_bytes > MOST_SHARED_MEMORY[row.target]]
    if too_large:
        print(
            f"{len(too_large)} kernels need more shared memory than their target has, {too_large[0]} among them.",
            file=sys.stderr,
        )
    return 1 if too_large else 0
