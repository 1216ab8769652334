"""Banks that are copied, locked or left by a writer: what was written is there once, and none writes over another."""

import contextlib
import errno
import os
import shutil

import pytest
import torch
from banks.small_bank import LLAMA_1B, layout_of, made, on_disk, record_of

from midus_hf.banks import MemoryBank
from midus_hf.banks.level_file import BankError, WritableLevel
from midus_hf.config.memories.hierarchical import HierFFNOptions


def test_a_copy_has_what_was_written_and_stays_sparse(tmp_path, opened):
    layout = layout_of(HierFFNOptions(sizes=[64, 32], branching=16), LLAMA_1B)
    bank = opened(made(tmp_path / "bank", layout, torch.bfloat16, seed=8), layout, writable=True)
    for level, index in ((1, 3), (2, -1), (2, 7), (2, 9)):
        bank.write(level, index, record_of(layout, level, index, torch.bfloat16))
    bank.forget((2, 9))
    bank.save(tmp_path / "new" / "copy")
    copied = opened(tmp_path / "new" / "copy", layout)
    assert copied.description["seed"] == 8 and copied.dtype == torch.bfloat16
    assert copied.written(1) == [3] and copied.written(2) == [-1, 7]
    for level, index in ((1, 3), (2, -1), (2, 7), (2, 9), (1, 0), (1, -1)):
        assert torch.equal(copied.block(level, index), bank.block(level, index))
    written = 2 * (layout.record_numel(1) + 2 * layout.record_numel(2))
    assert on_disk(copied.folder) < written + 2**17 < sum(path.stat().st_size for path in copied.folder.iterdir()) / 8


def test_a_bank_saved_where_it_lies_is_left_as_it_is(bank, folder):
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    bank.save(folder)
    bank.save(folder.parent / "." / "bank")
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_a_copy_replaces_what_another_bank_left_there(bank, tmp_path, opened):
    other = layout_of(HierFFNOptions(sizes=[5], branching=2))
    made(tmp_path / "there", other)
    bank.save(tmp_path / "there")
    copied = opened(tmp_path / "there")
    assert copied.written(1) == [1] and copied.written(3) == [-1, 5]


@pytest.mark.parametrize("how", ["write", "forget", "save"])
def test_what_is_written_to_a_linked_level_does_not_reach_the_other_copies(how, bank, folder, tmp_path):
    bank.close()
    read, copy_ = MemoryBank(folder, bank.layout), tmp_path / "copy"
    shutil.copytree(folder, copy_, copy_function=os.link)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if how == "save":
        read.save(copy_, {(1, 0): lambda: record_of(read.layout, 1, 7), (3, 5): lambda: record_of(read.layout, 3, 7)})
    else:
        with contextlib.closing(MemoryBank(copy_, read.layout, writable=True)) as written:
            if how == "write":
                written.write(3, 5, record_of(read.layout, 3, 7))
            else:
                written.forget((3, 5))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert (copy_ / "level-3.safetensors").read_bytes() != before["level-3.safetensors"]
    assert torch.equal(read.block(3, 5), record_of(read.layout, 3, 5))


def test_two_cannot_write_and_many_can_read(bank, folder, opened):
    with pytest.raises(BankError) as raised:
        MemoryBank(folder, bank.layout, writable=True)
    assert str(raised.value) == f"the memory bank in {folder} is being written by another run. Wait for it."
    assert all(opened(folder).written(1) == [1] for _ in range(2))


def test_where_the_file_system_has_no_locks_a_bank_is_written_all_the_same(folder, tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    made(tmp_path / "copy")
    monkeypatch.setattr("fcntl.flock", none)
    writer = MemoryBank(folder, layout_of(), writable=True)
    writer.write(1, 2, record_of(layout_of(), 1, 2))
    writer.save(tmp_path / "copy")
    writer.close()
    copy = MemoryBank(tmp_path / "copy", layout_of())
    assert torch.equal(copy.block(1, 2), record_of(layout_of(), 1, 2))
    copy.close()


def test_a_lock_of_a_bank_that_fails_otherwise_is_not_told_as_another_run(folder, monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fcntl.flock", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        MemoryBank(folder, layout_of(), writable=True)


def test_a_copy_that_broke_off_is_no_bank(bank, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(WritableLevel, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        bank.save(tmp_path / "copy")
    with pytest.raises(BankError, match="there is no memory bank in"):
        MemoryBank(tmp_path / "copy", layout_of())


def test_a_copy_does_not_take_the_place_of_what_another_run_writes(bank, tmp_path):
    other = MemoryBank(made(tmp_path / "there"), bank.layout, writable=True)
    other.write(1, 2, record_of(bank.layout, 1, 2))
    with pytest.raises(BankError, match="is being written by another run"):
        bank.save(tmp_path / "there")
    assert torch.equal(other.block(1, 2), record_of(bank.layout, 1, 2))
    other.close()
    bank.save(tmp_path / "there")
