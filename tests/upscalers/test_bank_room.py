"""Room for new banks: what no file can hold is refused, and what may outgrow the disk is told."""

import shutil

import pytest
import torch
from tiny import save_tiny_model

from midus_hf.config.fetched_blocks import BANKS_FOLDER, level_file
from tests.upscalers.checkpoints import load
from upscalers.runs.upscale import upscale


def test_a_bank_that_no_file_can_hold_is_refused_before_anything_is_written(base, command, tmp_path):
    options = ("--set", "branching=100000", "--set", "sizes=[0,0,64]")
    for dry in ((), ("--dry-run",)):
        done = command("--base", base, "--method", "hier-ffn", "--output", tmp_path / "out", *options, *dry)
        assert done.status == 2 and done.err.count("\n") == 1
        assert (
            "branching is 100000, so level 3 of the bank of hier-ffn has 1,000,000,000,000,000 blocks, a file of 98,"
            in done.err
        )
        assert (
            f"cannot hold even while it is empty ({tmp_path} has " in done.err
            and "Lower branching, or the sizes" in done.err
        )
        assert list(tmp_path.iterdir()) == []


def test_a_bank_that_would_outgrow_the_disk_as_it_trains_is_told(base, command, tmp_path, monkeypatch):
    free = 70_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
    words = ("--base", base, "--method", "hier-ffn", "--no-verify", "--output")
    done = command(*words, tmp_path / "large", "--set", "sizes=[4096]")
    told = f"the bank of hier-ffn takes 0.11 GB once all of its blocks are trained, but {tmp_path} has 0.07 GB free;"
    assert done.status == 0 and f"upscale: warning: {told}" in done.err
    assert command(*words, tmp_path / "small", "--set", "sizes=[64]").err == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_banks_are_as_large_as_their_layout_says(dtype, tmp_path):
    base = save_tiny_model("llama", tmp_path / "base", dtype)
    upscale(
        base=base,
        method="hier-kv",
        output=tmp_path / "out",
        options={"sizes": [3, 0, 2], "branching": 3},
        verify=False,
    )
    for name, layout in load(tmp_path / "out").config.memories().banks.items():
        for level in layout.levels:
            path = tmp_path / "out" / BANKS_FOLDER / name / level_file(level)
            header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
            assert path.stat().st_size == header + layout.file_bytes(level, dtype.itemsize)
