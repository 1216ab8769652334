"""The bank of blocks of a checkpoint, without torch: one folder per memory."""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from midus_hf.files.checkpoint_files import BANK_DESCRIPTION, BANKS_FOLDER, TREE_FILES, read_json
from midus_hf.memories.bank import MemoryFiles
from midus_hf.memories.hierarchical.options import BankLayout, block_layouts
from midus_hf.memories.registry import Memories, MemoryEntry

_LEVELS = ("level-[0-9].safetensors", "level-[0-9][0-9].safetensors")


class BlockFiles(MemoryFiles):
    """Bank of blocks: files of levels, a description, and the tree whose paths trained it, if any."""

    files = tuple(f"{BANKS_FOLDER}/*/{name}" for name in (BANK_DESCRIPTION, *TREE_FILES, *_LEVELS))

    def __init__(self, entry: MemoryEntry, memories: Memories):
        super().__init__(entry, memories)
        self.layout: BankLayout = block_layouts(memories)[entry.name]

    def folder(self, checkpoint: Path) -> Path:
        """Return the folder of the bank in a checkpoint's folder."""
        return checkpoint / BANKS_FOLDER / self.entry.name

    def create(self, folder: Path, dtype: str, seed: int) -> None:
        """Create unwritten blocks, by a seed derived for each memory: two must not start with equal values."""
        import torch

        from midus_hf.memories.hierarchical.bank import create_bank

        derived = int.from_bytes(hashlib.sha256(f"{seed}/{self.entry.name}".encode()).digest()[:4], "little")
        create_bank(self.folder(folder), self.layout, getattr(torch, dtype), derived)

    def copy(
        self,
        source: Path,
        folder: Path,
        deleted: Collection[tuple[int, int]] = (),
        tree: Any = None,
        tree_folder: Path | None = None,
    ) -> None:
        """Copy all blocks except those deleted, given by level and node; unwritten blocks take no space.

        With `tree`, a `ClusterTree`, and its folder, the bank gets this tree. Default: it keeps its own.
        """
        from midus_hf.memories.hierarchical.bank import MemoryBank

        bank = MemoryBank(self.folder(source), self.layout)
        if tree is not None:
            bank.grow(None, tree.fingerprint, tree.grown_from)
        bank.save(self.folder(folder), tree_folder=tree_folder, deleted=deleted)

    def bind_to_base(self, folder: Path) -> None:
        from midus_hf.memories.hierarchical.bank import write_description

        bank = self.folder(folder)
        write_description(bank, {**read_json(bank / BANK_DESCRIPTION), "layout": self.layout.to_dict()})

    @property
    def parameters(self) -> int:
        return self.layout.bank

    @property
    def fetched(self) -> int:
        return self.layout.fetched
