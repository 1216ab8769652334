"""A bank of memory blocks in files next to a checkpoint, which can be created, copied, and saved with changed blocks."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from midus_hf.files.checkpoint_files import BANK_DESCRIPTION, TREE_FILES
from midus_hf.files.outputs import atomic_write
from midus_hf.memories.hierarchical.bank.level_file import DELETED, write_level
from midus_hf.memories.hierarchical.bank.mapped_bank import DESCRIPTION_FORMAT, MappedBank
from midus_hf.memories.hierarchical.blocks import BankLayout, level_file

# Level of a block, counted from 1, and its node; -1 for the generic memory.
BlockKey = tuple[int, int]
# Functions that return records, `[numel]`, by block.
Records = Mapping[BlockKey, Callable[[], torch.Tensor]]


class MemoryBank(MappedBank):
    """Bank of a memory's blocks, one mapped file per level. Blocks are changed by saving the bank, which writes whole files."""

    def write(self, level: int, index: int, record: torch.Tensor) -> None:
        """Write the record of a block, `[numel]`, into the bank's files."""
        self.save(self.folder, {(level, index): lambda: record})

    def written(self, level: int) -> list[int]:
        """Return the nodes of a level whose blocks were written, ascending; -1 for the generic memory."""
        rows = self._levels[level]
        return [row - 1 for row in rows.marked() if rows.row(row) is not None]

    def deleted(self, level: int) -> list[int]:
        """Return the nodes of a level whose blocks were deleted and not written again, ascending."""
        return [row - 1 for row in self._levels[level].rows(DELETED)]

    def is_written(self, level: int, index: int) -> bool:
        """Return whether a block was written, and not deleted since."""
        return self._levels[level].row(index + 1) is not None

    def save(
        self,
        folder: str | os.PathLike,
        trained: Records | None = None,
        tree: str | None = None,
        tree_folder: Path | None = None,
        deleted: Collection[BlockKey] = (),
    ) -> None:
        """Write the bank into a folder. Blocks that were never written, or were deleted, are holes there.

        In the folder of this bank, files of levels without a change are kept.

        Args:
            folder: Folder of the copy, which is created if missing.
            trained: For each changed block, by level and node, a function that returns the new record. Default: no
                changes.
            tree: Fingerprint of the tree whose paths trained `trained`. Default: the tree of this bank.
            tree_folder: Folder with the files of that tree, which are copied along. Default: this bank's folder, which
                may have none.
            deleted: Level and node of further blocks to delete, only in another folder than this bank's, whose files then never
                contain their bytes. Default: none; blocks deleted in this bank stay deleted.
        """
        folder, trained = Path(folder), trained or {}
        in_place = folder.exists() and folder.samefile(self.folder)
        assert not (in_place and deleted), "files that are replaced leave their bytes on the disk"
        if not in_place:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / BANK_DESCRIPTION).unlink(missing_ok=True)  # marks a bank as complete, so it is written last
        for level, source in self._levels.items():
            changed = {index + 1: record for (its_level, index), record in trained.items() if its_level == level}
            gone = {index + 1 for its_level, index in deleted if its_level == level}
            rows = self.layout.num_records(level)
            if in_place and not changed and len(source.marks) == rows:
                continue
            kept = {
                row: source.blocks[row].detach
                for row in source.marked()
                if row not in changed and row not in gone and source.row(row) is not None
            }
            gone = {*gone, *source.rows(DELETED)} - changed.keys()
            write_level(
                folder / level_file(level), rows, source.blocks.shape[1], self.dtype, {**kept, **changed}, gone
            )
        self._save_tree(folder, tree_folder or self.folder)
        layout = self.layout.to_dict()
        layout["base"] = layout["base"] or self.description["layout"].get("base")
        changes = {"layout": layout, "tree": tree or self.tree, "roots": self.layout.blocks.roots}
        description = {**self.description, **changes}
        write_description(folder, description)
        if in_place:
            self.description = description
            self.map_files()

    def _save_tree(self, folder: Path, source: Path) -> None:
        """Copy the files of a tree into a folder, and remove another tree's files from the folder."""
        if folder.resolve() != source.resolve():
            for name in TREE_FILES:
                (folder / name).unlink(missing_ok=True)
            if all((source / name).is_file() for name in TREE_FILES):
                for name in TREE_FILES:
                    with atomic_write(folder / name) as partial:
                        shutil.copyfile(source / name, partial)


def create_bank(folder: str | os.PathLike, layout: BankLayout, dtype: torch.dtype, seed: int) -> None:
    """Create a bank of unwritten blocks, drawn from the seed. The bank takes a few pages on disk, and a byte per block."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for level in layout.levels:
        write_level(folder / level_file(level), layout.num_records(level), layout.record_numel(level), dtype, {})
    description = {"format": DESCRIPTION_FORMAT, "layout": layout.to_dict(), "seed": seed}
    write_description(folder, {**description, "tree": None, "roots": None, "grown_from": []})


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write the description of a bank into the bank's folder. It marks the bank as complete, so it is written last."""
    with atomic_write(folder / BANK_DESCRIPTION) as partial:
        partial.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
