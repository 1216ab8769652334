"""A bank of memory blocks in files beside a checkpoint, whose blocks can be written, deleted and copied."""

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from midus_hf.banks.bank_description import describe, described_again, lock, write_description
from midus_hf.banks.level_file import DELETED, UNWRITTEN, WritableLevel, copy_level, create_level_file
from midus_hf.banks.mapped_bank import MappedBank
from midus_hf.config.fetched_blocks import BANK_DESCRIPTION, TREE_FILES, BankLayout, level_file
from midus_hf.files.whole_files import link_or_copy, sync, whole_file

# Level of a block, counted from 1, and its node; -1 for the generic memory.
BlockKey = tuple[int, int]
# Functions that return records, `[numel]`, by block.
Records = Mapping[BlockKey, Callable[[], torch.Tensor]]


class MemoryBank(MappedBank):
    """Bank of a memory's blocks, one mapped file per level.

    Args:
        folder: Folder with the bank's files.
        layout: Layout that the model's config implies.
        writable: Whether blocks will be written. Nobody else can write to the bank then. Default: false.

    Raises:
        BankError: If there is no bank, the bank belongs to another model, or `writable` is true and another run is
            writing.
    """

    def __init__(self, folder: str | os.PathLike, layout: BankLayout, writable: bool = False):
        super().__init__(folder, layout)
        self._writable = writable
        self._lock = lock(self.folder) if writable else None

    def write(self, level: int, index: int, record: torch.Tensor) -> None:
        """Write the record of a block, `[numel]`, and flush it to the disk."""
        self.write_all({(level, index): lambda: record})

    def write_all(self, records: Records) -> None:
        """Write the records of blocks, and flush them to the disk."""
        assert self._writable, "the bank was opened to be read"
        self._enlarge()
        for level in self.layout.levels:
            rows = _rows_of(records, level)
            if rows:
                with contextlib.closing(self._opened(level)) as file:
                    file.write({row: records[level, row - 1] for row in rows})
        self.map_files()

    def forget(self, *blocks: BlockKey) -> None:
        """Delete blocks: zero their bytes on the disk. They start again as unwritten blocks, which add zero."""
        assert self._writable, "the bank was opened to be read"
        for level in self.layout.levels:
            rows = _rows_of(blocks, level)
            if rows:
                with contextlib.closing(self._opened(level)) as file:
                    file.delete(rows)
        self.map_files()

    def _enlarge(self) -> None:
        """Give the files the rows of a tree that has grown; old rows keep their bytes."""
        for level, source in self._levels.items():
            if len(source.marks) < self.layout.num_records(level):
                with whole_file(self.folder / level_file(level)) as partial:
                    copy_level(source, partial, self.layout.num_records(level), {}, ())
        self.map_files()

    def _opened(self, level: int) -> WritableLevel:
        rows, numel = self._levels[level].blocks.shape
        return WritableLevel(self.folder / level_file(level), rows, numel, self.dtype)

    def written(self, level: int) -> list[int]:
        """Return the nodes of a level whose blocks were written, ascending; -1 for the generic memory.

        Raises:
            BankError: If a block is half written, or has lost its mark.
        """
        rows = self._levels[level]
        return [row - 1 for row in (rows.marks != UNWRITTEN).nonzero().flatten().tolist() if rows.row(row) is not None]

    def deleted(self, level: int) -> list[int]:
        """Return the nodes of a level whose blocks were deleted and not written again, ascending."""
        return [row - 1 for row in self._levels[level].rows(DELETED)]

    def is_written(self, level: int, index: int) -> bool:
        """Return whether the file may hold numbers for a block: it was written, or was damaged while it was."""
        return int(self._levels[level].marks[index + 1]) not in (UNWRITTEN, DELETED)

    def save(
        self,
        folder: str | os.PathLike,
        trained: Records | None = None,
        tree: str | None = None,
        tree_folder: Path | None = None,
        deleted: Collection[BlockKey] = (),
    ) -> None:
        """Write the bank into another folder. Blocks that were never written, or were deleted, are holes there.

        Args:
            folder: Folder of the copy, which is created if missing. If this bank lies in the folder, nothing is done.
            trained: For each changed block, by level and node, a function that returns the new record. Default: no
                changes.
            tree: Fingerprint of the tree whose paths trained `trained`. Default: the tree of this bank.
            tree_folder: Folder with the files of that tree, which are copied along. Default: this bank's folder, which
                may have none.
            deleted: Level and node of further blocks to delete in the copy. These blocks are not read. Default: none;
                blocks deleted in this bank stay deleted.

        Raises:
            BankError: If another run is writing to a bank in `folder`, or a block that is copied is half written.
        """
        folder = Path(folder)
        if self.lies_in(folder):
            return
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / BANK_DESCRIPTION).exists():
            if (held := lock(folder)) is not None:  # a run that is writing there would lose its bank
                held.release()
            (folder / BANK_DESCRIPTION).unlink()  # marks a bank as complete, so removed first and written last
            sync(folder)
        trained = trained or {}
        for level, source in self._levels.items():
            path = folder / level_file(level)
            path.unlink(missing_ok=True)  # other folders may link the same file, which must not be overwritten
            changed = {row: trained[level, row - 1] for row in _rows_of(trained, level)}
            copy_level(source, path, self.layout.num_records(level), changed, _rows_of(deleted, level))
        self.save_tree(folder, tree_folder)
        write_description(folder, described_again(self.description, self.layout, tree or self.tree))

    def save_tree(self, folder: Path, tree_folder: Path | None = None) -> None:
        """Copy the files of the tree that trained the blocks into a folder, and remove another tree's files from the folder.

        Args:
            tree_folder: Folder with the tree's files. Default: this bank's folder, which may have none.
        """
        source = self.folder if tree_folder is None else tree_folder
        if folder.resolve() == source.resolve():
            return
        for name in TREE_FILES:
            (folder / name).unlink(missing_ok=True)
        if all((source / name).is_file() for name in TREE_FILES):
            for name in TREE_FILES:
                if tree_folder is None:
                    link_or_copy(source / name, folder / name)
                else:  # not linked, since a person may edit the tree's files in their folder
                    with whole_file(folder / name) as partial:
                        shutil.copyfile(source / name, partial)

    def lies_in(self, folder: str | os.PathLike) -> bool:
        """Return whether a folder is the folder of this bank."""
        return Path(folder).exists() and Path(folder).resolve() == self.folder.resolve()

    def close(self) -> None:
        """Close the files, and let others write. Nothing can be fetched afterwards."""
        self._levels = {}
        self.changed()
        if self._lock is not None:
            self._lock.release()


def _rows_of(blocks: Collection[BlockKey] | Records, level: int) -> list[int]:
    """Return the rows of blocks of one level."""
    return [index + 1 for its_level, index in blocks if its_level == level]


def create_bank(folder: str | os.PathLike, layout: BankLayout, dtype: torch.dtype, seed: int) -> None:
    """Create a bank of unwritten blocks, which start by the seed. The bank takes a few pages of disk, and a byte per block."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for level in layout.levels:
        create_level_file(folder / level_file(level), layout.num_records(level), layout.record_numel(level), dtype)
    write_description(folder, describe(layout, seed))
