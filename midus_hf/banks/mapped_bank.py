"""A bank of blocks that is read: one mapped file per level, of which a fetch takes rows."""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from midus_hf.banks.bank_description import read_description
from midus_hf.banks.block_reader import BlockReader
from midus_hf.banks.level_file import MappedLevel
from midus_hf.config.fetched_blocks import BankLayout, level_file


class MappedBank(BlockReader):
    """Bank of a memory's blocks, for reading. The system caches pages of its files; nothing else is kept but the last fetch."""

    def __init__(self, folder: str | os.PathLike, layout: BankLayout):
        self.folder = Path(folder)
        self.description: dict[str, Any] = read_description(self.folder, layout)
        super().__init__(layout.with_roots(self.description["roots"]))
        self.map_files()

    def map_files(self) -> None:
        """Map the files of all levels, again if they were mapped before."""
        layout = self.layout
        self._levels = {
            level: MappedLevel(self.folder / level_file(level), layout.num_records(level), layout.record_numel(level))
            for level in layout.levels
        }
        self.changed()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MappedBank":
        """Return this bank itself: copies of a model read the same bank."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process opens the same bank, for reading."""
        return MappedBank, (self.folder.absolute(), self.layout)

    def grow(self, roots: int | None, tree: str | None = None, grown_from: Collection[str] = ()) -> None:
        """Let paths name nodes of a tree that has grown from the bank's: their blocks start as unwritten blocks do."""
        # A tree as large as the bank's that the bank's came from has topics that were deleted since, and brings them back.
        is_earlier = tree in self.description["grown_from"] and roots != self.layout.blocks.nodes(1)
        if tree not in (None, self.description["tree"]) and not is_earlier:
            self.description |= {"tree": tree, "grown_from": list(grown_from)}
        if roots is not None and roots > self.layout.blocks.nodes(1):
            self.layout = self.layout.with_roots(roots)
            self.changed()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the blocks are stored."""
        return next(iter(self._levels.values())).blocks.dtype

    @property
    def tree(self) -> str | None:
        """Fingerprint of the tree whose paths trained the blocks; None if unknown, as before any training."""
        return self.description["tree"]

    def block(self, level: int, index: int) -> torch.Tensor:
        """Return the record of a block; a block that was never written or was deleted is drawn from the bank's seed."""
        record = self._levels[level].row(index + 1)
        return (
            initial_block(self.layout, level, index, self.description["seed"], self.dtype)
            if record is None
            else record
        )


def initial_block(layout: BankLayout, level: int, index: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the initial record of a block, `[numel]`, drawn in float32 and cast to `dtype`."""
    first_grown = layout.blocks.branching**level
    number = first_grown if index < 0 else index + (index >= first_grown)
    digest = hashlib.sha256(f"{seed}/{layout.memory_type}/{level}/{number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    record = torch.zeros(layout.record_numel(level), dtype=torch.float32)
    for tensor_place in layout.records[level]:
        tensor_place.tensor.initial.fill(
            record[tensor_place.start : tensor_place.start + tensor_place.numel], generator
        )
    return record.to(dtype)
