"""Every kernel compiles for GPUs that are not here, within what they have."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pairs import by_default, wanted_by_tests

from benchmarks.__main__ import main
from benchmarks.kernels import bounds

ROOT = Path(__file__).parents[3]
KERNELS = {
    "forward_kernel",
    "packed_forward_kernel",
    "score_gradient_kernel",
    "group_starts_kernel",
    "bucket_sums_kernel",
    "piece_sums_kernel",
    "add_rows_kernel",
    "select_kernel",
    "weighted_rows_kernel",
    "weight_gradients_kernel",
    "chapter_forward_kernel",
    "chapter_merge_kernel",
    "chapter_products_kernel",
    "chapter_pair_gradient_kernel",
    "chapter_table_gradient_kernel",
    "chapter_split_sums_kernel",
    "depth_forward_kernel",
    "depth_gradient_kernel",
    "fused_forward_kernel",
    "fused_rows_kernel",
    "fused_query_gradient_kernel",
    "fused_key_gradient_kernel",
    "write_numbers_kernel",
}

DEPTHS = ("depth of moda-700m", "depth of llama-3.1-8b", "depth of table 2, 32 queries a key")
BOTH = ("both of moda-700m", "both of llama-3.1-8b", "both of table 2")
READERS = ("depth_forward_kernel", "depth_gradient_kernel", "fused_forward_kernel", "fused_query_gradient_kernel")
"""Kernels that read slots."""


@pytest.fixture(scope="module")
def compiled(request):
    """A row for each kernel, case and target, of the targets that tests run with."""
    targets = ",".join(target for (target,) in wanted_by_tests(request, "target"))
    command = [sys.executable, "-m", "benchmarks", "kernels", "--targets", targets, "--json"]
    command += ["--count", ",".join(sorted({case for _, case in bounds.BOUNDS}))]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


TARGETS = [("sm_80", 163), ("sm_90", 227), ("sm_100", 227), ("gfx942", 64)]
"""And how many KiB of memory the threads of a block share."""


@pytest.mark.parametrize("target, shared_bytes", by_default([("sm_90", 227), ("gfx942", 64)], TARGETS))
def test_every_kernel_compiles_and_fits(target, shared_bytes, compiled):
    rows = [row for row in compiled if row["target"] == target]
    for row in rows:
        print(row)
    assert {row["kernel"] for row in rows} == KERNELS
    assert max(row["shared_bytes"] for row in rows) <= shared_bytes * 1024
    # A kernel whose inner loop spills is slow; those of the papers' shapes in bfloat16 must not.
    of_papers = (
        "llama-3.2-1b",
        "llama-3.1-8b",
        "chapters of llama-3.2-1b",
        "chapters of llama-3.1-8b",
        *DEPTHS,
        *BOTH,
    )
    spilling = [row for row in rows if row["case"] in of_papers and (row["spilled_bytes"] or 0) > 512]
    assert spilling == []
    # What addresses from a table are a multiple of is said to the compiler, which forgets it easily.
    slots = [row for row in rows if row["kernel"] in READERS and row["case"] in (*DEPTHS, *BOTH)]
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


MACHINE_CODE = """
        /*0000*/                   S2R R0, SR_CTAID.X ;                 /* 0x0 */
        /*0010*/                   IADD3 R1, R0, 0x1, RZ ;              /* 0x0 */
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;     /* 0x0 */
{body}        /*0100*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ ; /* 0x0 */
        /*0110*/               @P1 BRA 0x10 ;                          /* 0x0 */
        /*0120*/                   EXIT ;                              /* 0x0 */
        /*0130*/                   BRA 0x130;                          /* 0x0 */
        /*0140*/                   NOP;                                /* 0x0 */
""".format(
    body="".join(
        f"        /*00{place:x}0*/                   FMNMX R{place}, R8, R9, !PT ;\n" for place in range(3, 16)
    )
)


@pytest.mark.parametrize("trips, times", [((), 1), ((5,), 5), ((5, 7), 5)], ids=str)
def test_instructions_of_loops_count_as_often_as_they_run(trips, times):
    machine_code = pytest.importorskip("benchmarks.kernels.machine_code", exc_type=ImportError)
    found = machine_code.counted_text(MACHINE_CODE, trips)
    assert found == machine_code.Instructions(3 + 17 * times, 14 * times, times, times, 1)
    # 132 multiprocessors with four schedulers, which compare for half as many threads as they have, at 1.755 GHz.
    assert machine_code.least_microseconds(found, 1000) == pytest.approx(1e3 * 28 * times / (132 * 4 * 1755), rel=1e-6)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--targets", "sm_1"], "no target sm_1; expected some of sm_80, sm_90, sm_100, gfx942"),
        (["--kernels", "fast_kernel"], "no kernel fast_kernel; expected some of select_kernel."),
        (["--count", "gpt-2"], "no case gpt-2; expected some of 32 heads of 4"),
    ],
    ids=["target", "kernel", "case"],
)
def test_what_is_unknown_is_refused(words, message, monkeypatch):
    monkeypatch.setattr("os.environ", dict(os.environ))  # compiling does away with TRITON_INTERPRET
    launch = SimpleNamespace(kernel=SimpleNamespace(__name__="select_kernel"))
    monkeypatch.setattr("benchmarks.kernels.run.launches", lambda: [launch])
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(["kernels", *words])
