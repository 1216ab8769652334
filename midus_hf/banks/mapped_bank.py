"""A bank of blocks that is read: one mapped file per level, of which a fetch takes rows."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from midus_hf.banks.bank_description import read_description
from midus_hf.banks.block_reader import BlockReader
from midus_hf.banks.initial_blocks import initial_block
from midus_hf.banks.level_file import MappedLevel
from midus_hf.config.fetched_blocks import BankLayout, level_file


class MappedBank(BlockReader):
    """Bank of a memory's blocks, for reading. The system caches pages of its files; nothing else is kept but the last fetch.

    Args:
        folder: Folder with the bank's files.
        layout: Layout of the bank that the model's config implies.

    Raises:
        BankError: If a file is absent or damaged, or belongs to another model.
    """

    def __init__(self, folder: str | os.PathLike, layout: BankLayout):
        self.folder = Path(folder)
        self.description: dict[str, Any] = read_description(self.folder, layout)
        super().__init__(layout.with_roots(self.description["roots"]))
        self.map_files()

    def map_files(self) -> None:
        """Map the files of all levels, again if they were mapped before."""
        layout = self.layout
        self._paths = [self.folder / level_file(level) for level in layout.levels]
        self._levels = {
            level: MappedLevel(path, layout.num_records(level), layout.record_numel(level))
            for level, path in zip(layout.levels, self._paths, strict=True)
        }
        self.changed()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MappedBank":
        """Return this bank itself: copies of a model read the same bank."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process opens the same bank, for reading."""
        return MappedBank, (self.folder.absolute(), self.layout)

    def grow(self, roots: int | None, tree: str | None = None, grown_from: Collection[str] = ()) -> None:
        """Let paths name nodes of a tree that has grown from the bank's: their blocks start as unwritten blocks do.

        The files stay as they are until the bank is saved. A bank whose tree is larger already stays as it is.

        Args:
            roots: Nodes of the tree's first level; None for a tree that has not grown.
            tree: Fingerprint of the tree, to be saved with the bank. Default: None, for the tree that the bank has.
            grown_from: Fingerprints of the trees that `tree` was grown from. Default: none.
        """
        if tree is not None and tree not in (self.description["tree"], *self.description["grown_from"]):
            self.description |= {"tree": tree, "grown_from": list(grown_from)}
        if roots is not None and roots > self.layout.blocks.nodes(1):
            self.layout = self.layout.with_roots(roots)
            self.changed()

    def version(self) -> Any:
        """Return when the files were written last, in nanoseconds."""
        return tuple(path.stat().st_mtime_ns for path in self._paths if path.exists())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the blocks are stored."""
        return next(iter(self._levels.values())).blocks.dtype

    @property
    def tree(self) -> str | None:
        """Fingerprint of the tree whose paths trained the blocks; None if unknown, as before any training."""
        return self.description["tree"]

    def block(self, level: int, index: int) -> torch.Tensor:
        """Return the record of a block; a block that was never written or was deleted is drawn from the bank's seed.

        Raises:
            BankError: If the record is half written, or its mark was lost.
        """
        rows = self._levels[level]
        record = rows.row(index + 1) if index + 1 < len(rows.marks) else None
        if record is None:
            return initial_block(self.layout, level, index, self.description["seed"], self.dtype)
        return record
