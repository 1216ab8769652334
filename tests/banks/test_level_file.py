"""The file of a level: rows come back as they were written, the rest is a hole, and what is wrong with it is said."""

import contextlib
import os

import pytest
import torch
from safetensors import safe_open

from midus_hf.banks.level_file import (
    DELETED,
    HALF_WRITTEN,
    UNWRITTEN,
    WRITTEN,
    BankError,
    MappedLevel,
    WritableLevel,
    create_level_file,
)

ROWS, NUMEL = 7, 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def record(row, numel=NUMEL, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(row)).to(dtype)


def write(path, rows, dtype=torch.float32, numel=NUMEL):
    with contextlib.closing(WritableLevel(path, ROWS, numel, dtype)) as file:
        file.write({row: lambda seed=seed: record(seed, numel, dtype) for row, seed in rows.items()})


def delete(path, *rows, numel=NUMEL):
    with contextlib.closing(WritableLevel(path, ROWS, numel, torch.float32)) as file:
        file.delete(rows)


@pytest.fixture
def path(tmp_path):
    """A file of which rows 2 and 6 were written."""
    create_level_file(tmp_path / "level-1.safetensors", ROWS, NUMEL, torch.float32)
    write(tmp_path / "level-1.safetensors", {2: 2, 6: 6})
    return tmp_path / "level-1.safetensors"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_back_and_others_were_never_written(dtype, tmp_path):
    path = tmp_path / "file"
    create_level_file(path, ROWS, NUMEL, dtype)
    write(path, {6: 6, 0: 0, 3: 3}, dtype)
    write(path, {3: 4}, dtype)
    level = MappedLevel(path, ROWS, NUMEL)
    assert level.rows(WRITTEN) == [0, 3, 6] and level.rows(UNWRITTEN) == [1, 2, 4, 5]
    for row in range(ROWS):
        expected = record(4 if row == 3 else row, dtype=dtype) if row in (0, 3, 6) else None
        found = level.row(row)
        assert found is None if expected is None else torch.equal(found, expected)


def test_it_is_a_safetensors_file(path):
    """Whoever knows safetensors alone reads the blocks and their marks."""
    delete(path, 3)
    with safe_open(path, framework="numpy") as opened:
        assert set(opened.keys()) == {"blocks", "marks"}
        blocks, marks = opened.get_tensor("blocks"), opened.get_tensor("marks")
    assert marks.tolist() == [1, 1, 2, 4, 1, 1, 2]
    assert all(torch.equal(torch.from_numpy(blocks[row]), record(row)) for row in (2, 6))
    assert not blocks[[0, 1, 3, 4, 5]].any()


def test_a_row_is_a_part_of_the_mapped_file(path):
    level = MappedLevel(path, ROWS, NUMEL)
    assert level.row(2).untyped_storage().data_ptr() == level.row(6).untyped_storage().data_ptr()
    write(path, {2: 9})
    assert torch.equal(level.row(2), record(9)), "what is written later is seen"


def test_what_was_deleted_is_gone_until_it_is_written_again(path):
    delete(path, 2)
    level = MappedLevel(path, ROWS, NUMEL)
    assert level.row(2) is None and torch.equal(level.row(6), record(6)) and level.rows(DELETED) == [2]
    write(path, {2: 9})
    assert torch.equal(level.row(2), record(9)) and level.rows(DELETED) == []


class Killed(BaseException):
    """The end of a process, at the call where it is raised."""


@pytest.mark.parametrize("half", [False, True], ids=["between", "within"])
@pytest.mark.parametrize("calls", range(6))
@pytest.mark.parametrize("act", ["delete", "write"])
def test_what_is_killed_at_any_moment_is_done_or_not_begun_or_refused(act, calls, half, path, monkeypatch):
    """After so many writes and syncs that were done, nothing more is; `half`: but half of the one at which the process ends."""
    old, new, begun = record(2), record(9), []
    real_write, real_sync = os.pwrite, os.fsync

    def is_killed() -> bool:
        begun.append(1)
        return len(begun) > calls

    def pwrite(descriptor, data, position):
        if not is_killed():
            return real_write(descriptor, data, position)
        if half:
            real_write(descriptor, data[: len(data) // 2], position)
        raise Killed

    def fsync(descriptor):
        if is_killed():
            raise Killed
        real_sync(descriptor)

    def run():
        if act == "delete":
            delete(path, 2)
        else:
            write(path, {2: 9})

    monkeypatch.setattr("midus_hf.banks.level_file.os.pwrite", pwrite)
    monkeypatch.setattr("midus_hf.banks.level_file.os.fsync", fsync)
    with contextlib.suppress(Killed):
        run()
    monkeypatch.undo()
    level = MappedLevel(path, ROWS, NUMEL)
    if level.rows(DELETED):
        assert act == "delete" and not level.blocks[2].any()
    elif level.marks[2] == HALF_WRITTEN:
        with pytest.raises(
            BankError, match=r"is half written: a process ended while it wrote it. Copy the bank again, or"
        ):
            level.row(2)
    else:
        assert torch.equal(level.row(2), old if calls == 0 else new)
    run()
    level = MappedLevel(path, ROWS, NUMEL)
    assert level.row(2) is None if act == "delete" else torch.equal(level.row(2), new)
    assert torch.equal(level.row(6), record(6))
    remains = any(old[start : start + 2].numpy().tobytes() in path.read_bytes() for start in range(NUMEL - 1))
    assert not remains


def test_zeros_are_on_the_disk_before_the_mark_says_that_a_row_was_deleted(path, monkeypatch):
    order, real_write, real_sync = [], os.pwrite, os.fsync
    monkeypatch.setattr(
        "midus_hf.banks.level_file.os.pwrite", lambda *args: [order.append(bytes(args[1])), real_write(*args)][1]
    )
    monkeypatch.setattr(
        "midus_hf.banks.level_file.os.fsync", lambda *args: [order.append("sync"), real_sync(*args)][1]
    )
    delete(path, 2)
    half, gone = bytes([HALF_WRITTEN]), bytes([DELETED])
    assert order == [half, "sync", bytes(4 * NUMEL), "sync", gone, "sync"]


def test_a_deletion_gives_the_room_back(tmp_path):
    numel, path = 2**18, tmp_path / "large"  # 1 MB
    create_level_file(path, ROWS, numel, torch.float32)
    write(path, {3: 3}, numel=numel)
    before = path.stat().st_blocks
    delete(path, 3, numel=numel)
    assert path.stat().st_blocks <= before - 2**20 // 512 + 2 * 4096 // 512


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_mark_that_was_lost_names_its_block_whether_it_was_written_or_not(path, row):
    """Zeros never mean that blocks were not written: these would vanish without a word."""
    content = bytearray(path.read_bytes())
    content[len(content) - ROWS + row] = 0
    path.write_bytes(content)
    name = "the generic block" if row == 0 else f"block {row - 1}"
    with pytest.raises(
        BankError, match=f"{name} of bank file {path} is without its mark. Copy the bank again, or delete"
    ):
        MappedLevel(path, ROWS, NUMEL).row(row)


@pytest.mark.parametrize("damage", ["cut", "longer", "header", "empty", "other tensors", "gone", "rows", "numel"])
def test_a_file_that_is_none_of_the_bank_is_refused(damage, path):
    content = path.read_bytes()
    changed = {
        "cut": content[:-1],
        "longer": content + b"0",
        "header": content[:8] + b"?" + content[9:],
        "empty": b"",
        "other tensors": content.replace(b'"marks"', b'"other"'),
    }
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(changed.get(damage, content))
    rows, numel = ROWS + (damage == "rows"), NUMEL + (damage == "numel")
    expected = {"gone": "is absent", "rows": "has blocks of shape", "numel": "has blocks of shape"}
    with pytest.raises(BankError, match=f"bank file {path} {expected.get(damage, 'cannot be read')}"):
        MappedLevel(path, rows, numel)
