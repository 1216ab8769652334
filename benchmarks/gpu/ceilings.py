"""Measure the ceilings of a device, which other measurements are compared with: bytes copied and bfloat16 operations per second.

python -m benchmarks.gpu.ceilings --device cuda --results FOLDER
"""

import sys
from dataclasses import asdict

import torch

from benchmarks.options import chosen_device, device_command
from benchmarks.timing import Task, interleaved
from benchmarks.tracked import append, this_run

FILE = "ceilings.csv"
# Bytes read and written by the copy, and the number of rows and columns of the matrices.
_SIZES = {"cuda": (1 << 32, 8192), "cpu": (1 << 26, 512)}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and append to `ceilings.csv`; return 0.

    The column `per_second` counts bytes read and written, or operations.
    """
    chosen = device_command(__doc__).parse_args(arguments)
    device = chosen_device(chosen)
    size, width = _SIZES[device]
    source = torch.randint(256, (size // 8,), device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    work = {"bytes copied": 2.0 * size, "bfloat16 operations": 2.0 * width**3}
    tasks = {
        "bytes copied": Task(lambda _: target.copy_(source)),
        "bfloat16 operations": Task(lambda _: left @ right),
    }
    this = this_run(device)
    rows = []
    for what, timing in interleaved(tasks, device, seconds=2.0).items():
        per_second = 1e3 * work[what] / timing.median_ms
        measured = {"what": what, "median_ms": round(timing.median_ms, 4), "per_second": per_second}
        rows.append({**asdict(this), **measured})
        print(f"{what}: {per_second:.3g} a second", file=sys.stderr)
    if not chosen.no_append:
        append(rows, chosen.results / FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
