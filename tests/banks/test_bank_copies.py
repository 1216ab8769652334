"""Banks that are copied, locked or left by a writer: what was written is there once, and none writes over another."""

import contextlib
import errno
import os
import shutil

import pytest
import torch
from banks.small_bank import LLAMA_1B, flip, layout_of, made, on_disk, open_files, record_of

from midus_hf.banks import MemoryBank
from midus_hf.banks.level_file import BankError, LevelFile
from midus_hf.config.memories.hierarchical import HierFFNOptions


def test_a_copy_has_what_was_written_and_stays_sparse(tmp_path, opened):
    layout = layout_of(HierFFNOptions(sizes=[64, 32], branching=16), LLAMA_1B)
    bank = opened(made(tmp_path / "bank", layout, torch.bfloat16, seed=8), layout, writable=True)
    for level, index in ((1, 3), (2, 256), (2, 7), (2, 9)):
        bank.write(level, index, record_of(layout, level, index, torch.bfloat16))
    bank.forget(2, 9)
    bank.save(tmp_path / "new" / "copy")
    copied = opened(tmp_path / "new" / "copy", layout)
    assert copied.seed == 8 and copied.dtype == torch.bfloat16
    assert copied.written(1) == [3] and copied.written(2) == [7, 256]
    for level, index in ((1, 3), (2, 256), (2, 7), (2, 9), (1, 0), (1, 16)):
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
    assert copied.written(1) == [1] and copied.written(3) == [5, 64]


def numbers(folder):
    """Of the files of levels: those of one number are one file."""
    return {path.name: path.stat().st_ino for path in folder.glob("level-*.safetensors")}


@pytest.fixture
def read(bank, folder, opened):
    """The same bank, to be read; a block of level 1 is deleted there."""
    bank.forget(1, 2)
    bank.close()
    return opened(folder)


def test_levels_that_hold_what_is_to_be_written_are_linked_and_others_are_written(read, folder, tmp_path, opened):
    layout, plain, copy_ = read.layout, tmp_path / "plain", tmp_path / "copy"
    new = record_of(layout, 3, 99)
    for trained in ({(3, 6): lambda: new}, {(3, 5): lambda: new}, {(3, 5): lambda: read.block(3, 5)}):
        read.save(plain, trained)
        read.save(copy_, trained, link_from=folder)
        is_new = not torch.equal(next(iter(trained.values()))(), record_of(layout, 3, 5))
        shared = {name for name, number in numbers(copy_).items() if number == numbers(folder)[name]}
        assert shared == {"level-1.safetensors"} | (set() if is_new else {"level-3.safetensors"})
        assert all((copy_ / name).read_bytes() == (plain / name).read_bytes() for name in numbers(folder))
    read.save(copy_, deleted=[(3, 5)], link_from=folder)
    copied = opened(copy_)
    assert copied.deleted(3) == [5] and copied.deleted(1) == [2] and read.written(3) == [5, 64]


@pytest.mark.parametrize("hindrance", ["flipped", "cut", "header", "gone", "no links", "another writes", "no bank"])
def test_a_level_that_cannot_be_linked_is_written(hindrance, read, tmp_path, opened, monkeypatch):
    copy_, again = tmp_path / "copy", tmp_path / "again"
    read.save(copy_)
    path = copy_ / "level-3.safetensors"
    if hindrance in ("flipped", "header"):
        flip(path, -1 if hindrance == "flipped" else 9)
    elif hindrance == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif hindrance == "gone":
        path.unlink()
    elif hindrance == "no bank":
        (copy_ / "bank.json").unlink()
    elif hindrance == "another writes":
        opened(copy_, writable=True)
    else:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EMLINK, "Too many links")))
    read.save(again, link_from=copy_)
    assert (again / path.name).stat().st_nlink == 1
    saved = opened(again)
    assert saved.written(1) == [1] and saved.written(3) == [5, 64] and saved.deleted(1) == [2]
    assert all(torch.equal(saved.block(*key), read.block(*key)) for key in ((1, 1), (3, 5), (3, 64)))


@pytest.mark.parametrize("how", ["write", "forget", "save"])
def test_what_is_written_to_a_linked_level_does_not_reach_the_other_copies(how, read, folder, tmp_path):
    copy_ = tmp_path / "copy"
    read.save(copy_, link_from=folder)
    assert numbers(copy_) == numbers(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if how == "save":
        read.save(copy_, {(1, 0): lambda: record_of(read.layout, 1, 7), (3, 5): lambda: record_of(read.layout, 3, 7)})
    else:
        with contextlib.closing(MemoryBank(copy_, read.layout, writable=True)) as written:
            if how == "write":
                written.write(3, 5, record_of(read.layout, 3, 7))
            else:
                written.forget(3, 5)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert (copy_ / "level-3.safetensors").read_bytes() != before["level-3.safetensors"]
    assert torch.equal(read.block(3, 5), record_of(read.layout, 3, 5))


def test_a_bank_that_is_being_written_is_never_linked(bank, folder, tmp_path):
    """What is open for writing would be written through."""
    bank.save(tmp_path / "copy", link_from=folder)
    assert not set(numbers(tmp_path / "copy").values()) & set(numbers(folder).values())


def test_a_copy_of_a_bank_with_a_flipped_byte_is_refused(bank, folder, tmp_path):
    flip(folder / "level-3.safetensors")
    with pytest.raises(BankError, match=r"block 64 of bank file .*level-3\.safetensors is not what was written"):
        bank.save(tmp_path / "copy")


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

    monkeypatch.setattr(LevelFile, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        bank.save(tmp_path / "copy")
    with pytest.raises(BankError, match="there is no memory bank in"):
        MemoryBank(tmp_path / "copy", layout_of())


def test_a_copy_does_not_take_the_place_of_what_another_run_writes(bank, tmp_path):
    other = MemoryBank(made(tmp_path / "there"), bank.layout, writable=True)
    other.write(1, 2, record_of(bank.layout, 1, 2))
    with pytest.raises(BankError, match="is being written by another run"):
        bank.save(tmp_path / "there")
    other._drop(1, 2)
    assert torch.equal(other.block(1, 2), record_of(bank.layout, 1, 2))
    other.close()
    bank.save(tmp_path / "there")


def test_a_bank_that_could_not_be_opened_for_writing_can_be_once_it_is_repaired(folder, tmp_path):
    path = folder / "level-3.safetensors"
    shutil.copy(path, tmp_path / "kept")
    path.unlink()
    before = open_files()
    for _ in range(3):
        with pytest.raises(BankError, match="cannot be opened"):
            MemoryBank(folder, layout_of(), writable=True)
    assert open_files() == before
    shutil.copy(tmp_path / "kept", path)
    MemoryBank(folder, layout_of(), writable=True).close()
