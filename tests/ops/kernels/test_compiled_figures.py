"""What kernels need that are compiled for GPUs that are not here, at every shape: shared memory, registers, instructions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pairs import by_default, wanted_by_tests

from benchmarks.kernels import bounds

ROOT = Path(__file__).parents[3]
DEPTHS = ("depth of moda-700m", "depth of llama-3.1-8b", "depth of table 2 with 32 queries per key")
# Kernels that read slots.
READERS = ("depth_forward_kernel", "depth_gradient_kernel")


OF_PAPERS = (
    "llama-3.2-1b",
    "llama-3.1-8b",
    "chapters of llama-3.2-1b",
    "chapters of llama-3.1-8b",
    *DEPTHS,
)
# Which need most of what threads share.
LARGEST = ("head 256", "n 1024", "chapters of 1000 with head 256 in float32", "depth of 512 with head 256 in float32")


@pytest.fixture(scope="module")
def compiled(request):
    """A row for each kernel, case and target, of the targets that tests run with, and by default of the cases named here."""
    counted = {case for _, case in bounds.BOUNDS}
    command = [sys.executable, "-m", "benchmarks", "kernels", "--json", "--count", ",".join(sorted(counted))]
    command += ["--targets", ",".join(target for (target,) in wanted_by_tests(request, "target"))]
    if not request.config.getoption("--product"):
        command += ["--cases", ",".join({*OF_PAPERS, *LARGEST, *counted})]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


# And how many KiB of memory the threads of a block share.
TARGETS = [("sm_80", 163), ("sm_90", 227), ("sm_100", 227), ("gfx942", 64)]


@pytest.mark.parametrize("target, shared_bytes", by_default([("sm_90", 227)], TARGETS))
def test_every_kernel_fits(target, shared_bytes, compiled):
    rows = [row for row in compiled if row["target"] == target]
    for row in rows:
        print(row)
    assert max(row["shared_bytes"] for row in rows) <= shared_bytes * 1024
    # A kernel whose inner loop spills is slow; those of the papers' shapes in bfloat16 must not.
    spilling = [row for row in rows if row["case"] in OF_PAPERS and (row["spilled_bytes"] or 0) > 512]
    assert spilling == []
    # What addresses from a table are a multiple of is said to the compiler, which forgets it easily.
    slots = [row for row in rows if row["kernel"] in READERS and row["case"] in DEPTHS]
    assert all(row["wide_loads"] is None or row["wide_loads"] >= 6 for row in slots)
    assert not any(row["narrow_loads"] for row in slots)
    if target == bounds.TARGET:
        assert_within_bounds(rows)


def assert_within_bounds(rows):
    """Kernels need no more than when they were last looked at, nor do bounds stay that nothing comes near."""
    first = {(row["kernel"], row["case"]): row for row in reversed(rows)}
    for key, bound in bounds.BOUNDS.items():
        row = first[key]
        found = row["registers"], row["instructions"]["all"], row["instructions"]["alu"]
        most = bound.registers, bound.instructions, bound.alu
        assert all(0.85 * limit < number <= limit for number, limit in zip(found, most, strict=True)), (key, row)
        assert row["floor_us"] > 0
