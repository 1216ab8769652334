"""Every kernel compiles for GPUs that are not here, one of each maker: a few shapes that ask for all kernels."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels import cases, main

ROOT = Path(__file__).parents[3]
KERNELS = {
    "forward_kernel",
    "score_gradient_kernel",
    "group_starts_kernel",
    "bucket_sums_kernel",
    "piece_sums_kernel",
    "scores_kernel",
    "weighted_rows_kernel",
    "weight_gradients_kernel",
    "chapter_forward_kernel",
    "chapter_row_gradient_kernel",
    "chapter_table_gradient_kernel",
    "depth_forward_kernel",
    "depth_gradient_kernel",
    "write_numbers_kernel",
}


TARGETS = ("sm_90", "gfx942")
CASES = ("llama-3.2-1b", "32 heads of 4 over width 2048 in bfloat16", "chapters of llama-3.2-1b", "depth of moda-700m")


def test_every_kernel_compiles():
    chosen = ["--targets", ",".join(TARGETS), "--cases", ",".join(CASES)]
    command = [sys.executable, "-m", "benchmarks.kernels", *chosen, "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = json.loads(run.stdout)
    assert {(row["kernel"], row["target"]) for row in rows} == {*itertools.product(KERNELS, TARGETS)}
    assert {row["case"] for row in rows} == {*CASES}
    # A kernel whose inner loop spills is slow; those of the papers' shapes in bfloat16 must not.
    assert [row for row in rows if row["case"] != CASES[1] and (row["spilled_bytes"] or 0) > 512] == []
    # What addresses from a table are a multiple of is said to the compiler, which forgets it easily.
    slots = [row for row in rows if row["kernel"] in ("depth_forward_kernel", "depth_gradient_kernel")]
    assert all(row["wide_loads"] is None or row["wide_loads"] >= 6 for row in slots)
    assert not any(row["narrow_loads"] for row in slots)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--targets", "sm_1"], "'sm_1' is unknown; expected some of sm_80, sm_90, gfx942"),
        (["--cases", "gpt-2"], "'gpt-2' is unknown; expected some of llama-3.2-1b"),
    ],
    ids=["target", "case"],
)
def test_unknown_names_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err


def test_case_names_have_no_commas():
    assert not any("," in name for name, _ in cases())
