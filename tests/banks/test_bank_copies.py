"""Banks that are copied: what was written is there once, and a copy that was not finished is none."""

import contextlib
import os
import shutil

import pytest
import torch
from banks.small_bank import LLAMA_1B, layout_of, made, on_disk, opened, record_of

from midus_hf.memories.hierarchical import bank as bank_module
from midus_hf.memories.hierarchical.bank import MemoryBank
from midus_hf.memories.hierarchical.options import HierFFNOptions


def test_bank_copy_has_written_blocks_and_stays_sparse(tmp_path):
    layout = layout_of(HierFFNOptions(sizes=[64, 32], branching=16), LLAMA_1B)
    bank = opened(made(tmp_path / "bank", layout, torch.bfloat16, seed=8), layout)
    for level, index in ((1, 3), (2, -1), (2, 7), (2, 9)):
        bank.write(level, index, record_of(layout, level, index, torch.bfloat16))
    bank.save(tmp_path / "new" / "copy", deleted=[(2, 9)])
    copied = opened(tmp_path / "new" / "copy", layout)
    assert copied.description["seed"] == 8
    assert copied.dtype == torch.bfloat16
    assert (copied.written(1), copied.written(2)) == ([3], [-1, 7])
    for level, index in ((1, 3), (2, -1), (2, 7), (1, 0), (1, -1)):
        assert torch.equal(copied.block(level, index), bank.block(level, index))
    fresh = opened(made(tmp_path / "fresh", layout, torch.bfloat16, seed=8), layout)
    assert copied.deleted(2) == [9]
    assert torch.equal(copied.block(2, 9), fresh.block(2, 9)), "it starts again"
    written = 2 * (layout.record_numel(1) + 2 * layout.record_numel(2))
    assert on_disk(copied.folder) < written + 2**17 < sum(path.stat().st_size for path in copied.folder.iterdir()) / 8


def test_bank_saved_in_place_keeps_its_files(bank, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    numbers = [path.stat().st_ino for path in sorted(folder.glob("level-*"))]
    bank.save(folder)
    bank.save(folder.parent / "." / "bank")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.stat().st_ino for path in sorted(folder.glob("level-*"))] == numbers


def test_bank_copy_replaces_another_bank(bank, tmp_path):
    other = layout_of(HierFFNOptions(sizes=[5], branching=2))
    made(tmp_path / "there", other)
    bank.save(tmp_path / "there")
    copied = opened(tmp_path / "there")
    assert (copied.written(1), copied.written(3)) == ([1], [-1, 5])


@pytest.mark.parametrize("how", ["write", "save"])
def test_write_to_linked_level_keeps_other_copies(how, bank, folder, tmp_path):
    linked = tmp_path / "copy"
    shutil.copytree(folder, linked, copy_function=os.link)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if how == "save":
        bank.save(linked, {(1, 0): lambda: record_of(bank.layout, 1, 7), (3, 5): lambda: record_of(bank.layout, 3, 7)})
    else:
        MemoryBank(linked, bank.layout).write(3, 5, record_of(bank.layout, 3, 7))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert (linked / "level-3.safetensors").read_bytes() != before["level-3.safetensors"]
    assert torch.equal(bank.block(3, 5), record_of(bank.layout, 3, 5))


@pytest.mark.parametrize("damaged", [0, 2, 6])
def test_block_without_mark_is_copied_only_if_replaced(damaged, bank, folder, tmp_path):
    """Zeros never mean that blocks were not written: these would vanish silently."""
    file = folder / "level-3.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) - 65 + damaged] = 0
    file.write_bytes(content)
    read, key = MemoryBank(folder, bank.layout), (3, damaged - 1)
    name = f"block {damaged - 1}" if damaged else "the generic block"
    with pytest.raises(
        ValueError, match=rf"{name} of .* is without its mark\. Copy the bank again, or delete the block"
    ):
        read.save(tmp_path / "copy")
    read.save(tmp_path / "without", deleted=[key])
    read.save(tmp_path / "other", {key: lambda: record_of(bank.layout, *key)})
    assert MemoryBank(tmp_path / "without", bank.layout).deleted(3) == [damaged - 1]
    assert torch.equal(MemoryBank(tmp_path / "other", bank.layout).block(*key), record_of(bank.layout, *key))


def test_interrupted_copy_is_not_a_bank(bank, folder, tmp_path, interrupted_level):
    with pytest.raises(KeyboardInterrupt):
        bank.save(tmp_path / "copy")
    with pytest.raises(ValueError, match="there is no memory bank in"):
        MemoryBank(tmp_path / "copy", layout_of())
    with pytest.raises(KeyboardInterrupt):
        bank.save(folder, {(1, 1): lambda: record_of(bank.layout, 1, 7), (3, 5): lambda: record_of(bank.layout, 3, 7)})
    left = MemoryBank(folder, bank.layout)
    assert torch.equal(left.block(1, 1), record_of(bank.layout, 1, 7)), "level 1 was done"
    assert torch.equal(left.block(3, 5), record_of(bank.layout, 3, 5)), "level 3 was not begun"


@pytest.fixture
def interrupted_level(monkeypatch):
    """Interrupt what writes the file of level 3, in the middle of it."""
    real = bank_module.atomic_write

    @contextlib.contextmanager
    def interrupted(path):
        with real(path) as partial:
            yield partial
            if path.name == "level-3.safetensors":
                raise KeyboardInterrupt

    monkeypatch.setattr(bank_module, "atomic_write", interrupted)
