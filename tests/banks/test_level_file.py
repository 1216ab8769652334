"""The file of a level: rows come back as they were written, and the rest is a hole."""

import os

import pytest
import torch
from safetensors import safe_open

from midus_hf.memories.hierarchical.bank import DELETED, UNWRITTEN, WRITTEN, MappedLevel, write_level

ROWS, NUMEL = 7, 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def record(row, numel=NUMEL, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(row)).to(dtype)


@pytest.fixture
def path(tmp_path):
    """A file of which rows 2 and 6 were written, and row 3 was deleted."""
    path = tmp_path / "level-1.safetensors"
    write_level(path, ROWS, NUMEL, torch.float32, {row: lambda row=row: record(row) for row in (6, 2)}, [3])
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_level_rows_come_back_as_written(dtype, tmp_path):
    write_level(tmp_path / "file", ROWS, NUMEL, dtype, {row: lambda row=row: record(row) for row in (6, 0, 3)})
    level = MappedLevel(tmp_path / "file", ROWS, NUMEL)
    assert (level.rows(WRITTEN), level.rows(UNWRITTEN)) == ([0, 3, 6], [1, 2, 4, 5])
    for row in range(ROWS):
        result = level.row(row)
        assert torch.equal(result, record(row, dtype=dtype)) if row in (0, 3, 6) else result is None


def test_level_file_is_a_safetensors_file(path):
    with safe_open(path, framework="numpy") as opened:
        assert set(opened.keys()) == {"blocks", "marks"}
        blocks, marks = opened.get_tensor("blocks"), opened.get_tensor("marks")
    assert marks.tolist() == [1, 1, 2, 3, 1, 1, 2]
    assert all(torch.equal(torch.from_numpy(blocks[row]), record(row)) for row in (2, 6))
    assert not blocks[[0, 1, 3, 4, 5]].any()


def test_mapped_row_stays_when_its_file_is_replaced(path):
    level = MappedLevel(path, ROWS, NUMEL)
    assert level.row(2).untyped_storage().data_ptr() == level.row(6).untyped_storage().data_ptr()
    write_level(path, ROWS, NUMEL, torch.float32, {2: lambda: record(9)})
    assert torch.equal(level.row(2), record(2))
    assert torch.equal(MappedLevel(path, ROWS, NUMEL).row(2), record(9))


def test_level_file_may_exceed_the_memory_of_the_machine(tmp_path):
    numel, path = 2**20, tmp_path / "larger"
    rows = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (4 * numel)
    write_level(path, rows, numel, torch.float32, {rows - 1: lambda: record(3, numel)})
    assert torch.equal(MappedLevel(path, rows, numel).row(rows - 1), record(3, numel))


def test_deleted_row_is_a_hole(tmp_path):
    numel, path = 2**18, tmp_path / "large"  # 1 MB
    write_level(path, ROWS, numel, torch.float32, {3: lambda: record(3, numel)}, [2])
    assert path.stat().st_blocks * 512 <= 2**20 + 4 * 4096, "seven rows take the room of the one that was written"
    level = MappedLevel(path, ROWS, numel)
    assert level.row(2) is None
    assert level.rows(DELETED) == [2]
    assert not level.blocks[2].any()
