"""A bank of memory blocks in files beside a checkpoint, of which texts fetch some."""

import contextlib
import functools
import os
import shutil
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from midus_hf.banks.bank_description import (
    describe,
    described_again,
    lock,
    read_description,
    tree_of,
    write_description,
)
from midus_hf.banks.block_reader import BlockReader, stacked
from midus_hf.banks.initial_blocks import initial_block
from midus_hf.banks.level_file import LevelCopy, LevelFile, create_level_file
from midus_hf.banks.reading_threads import ReadingThreads
from midus_hf.banks.reads_under_way import ReadsUnderWay
from midus_hf.banks.record_read import DELETED, UNWRITTEN, RecordRead
from midus_hf.banks.tiers import TIERS, BankTiers, BlockKey, KeptBlock, KeptBlocks, Tier, TierStatistics
from midus_hf.config.fetched_blocks import BANK_AUDIT, BANK_DESCRIPTION, TREE_FILES, BankLayout, level_file
from midus_hf.files.locks import Lock, has_no_locks
from midus_hf.files.whole_files import link_or_copy, sync, whole_file

_WORTH_THREADS = 2**20
"""Bytes that several threads read faster than one."""


class MemoryBank(BlockReader):
    """The blocks of a memory: a file per level, read when a text asks for a block, and kept while there is room.

    One thread fetches. Blocks on a device are kept for one device and dtype at a time, those of the last fetch.

    Args:
        folder: Of the bank.
        layout: That the model's config implies.
        writable: Whether blocks will be written; nobody else can then. Default: false.
        cache_bytes: Of blocks that were read last, to keep in memory: `memory_bytes` of tiers. Default: what those say.
        tiers: Where blocks wait, `BankTiers` or a mapping of its arguments. Default: all in 1 GB of memory.

    Raises:
        BankError: If there is no bank, or that of another model, or somebody else writes to it.
        ValueError: If tiers do not fit the tree.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        layout: BankLayout,
        writable: bool = False,
        cache_bytes: int | None = None,
        tiers: BankTiers | Mapping[str, Any] | None = None,
    ):
        super().__init__(layout)
        self.tiers = BankTiers.of(tiers)
        self.tiers.check(layout)
        if cache_bytes is not None:
            self.tiers = replace(self.tiers, memory_bytes=cache_bytes)
        self.folder = Path(folder)
        self.description = read_description(self.folder, layout)
        self.seed: int = self.description["seed"]
        self._threads = ReadingThreads()
        self._memory, self._device = KeptBlocks(self.tiers.memory_bytes), KeptBlocks(self.tiers.device_bytes)
        self._place: tuple[torch.device, torch.dtype] | None = None
        self._under_way = ReadsUnderWay(self._threads, self.tiers.ahead_bytes)
        self._counts = {tier: TierStatistics() for tier in TIERS}
        self._writable = writable
        self._lock = lock(self.folder) if writable else None
        self._files: dict[int, LevelFile] = {}
        try:
            for level in layout.levels:
                path, records = self.folder / level_file(level), layout.num_records(level)
                self._files[level] = LevelFile(path, records, layout.record_numel(level), writable, self._threads)
        except BaseException:
            self.close()
            raise
        weakref.finalize(self, self._threads.abandon)

    @property
    def dtype(self) -> torch.dtype:
        """That blocks are stored in."""
        return next(iter(self._files.values())).dtype

    @property
    def tree(self) -> str | None:
        """Fingerprint of the tree by whose paths blocks were trained; None if nobody knows it, as before training."""
        return tree_of(self.description)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MemoryBank":
        """Itself: copies of a model read the same bank."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """The same bank, to be read: an open file is nothing to another process."""
        return MemoryBank, (self.folder.absolute(), self.layout, False, None, self.tiers)

    def block(self, level: int, index: int) -> torch.Tensor:
        """The record of a block, `[numel]`, on the CPU; not to be changed.

        Args:
            level: Counted from 1.
            index: Of the node within the level, or, behind the last, the generic memory's.
        """
        tier: Tier = "disk" if self.tiers.of_level(level) == "disk" else "memory"
        return self._block(level, index, self._counts[tier], None if tier == "disk" else self._memory)

    def keeps(self, level: int, index: int) -> bool:
        """Whether a block is in memory or on a device, so that fetching it reads nothing."""
        return any(self._current(kept, (level, index)) is not None for kept in (self._memory, self._device))

    def statistics(self) -> dict[str, TierStatistics]:
        """What fetches found in each tier since the bank was opened."""
        held = {"device": self._device.held_bytes, "memory": self._memory.held_bytes, "disk": 0}
        return {tier: replace(counts, held_bytes=held[tier]) for tier, counts in self._counts.items()}

    def read_ahead(self, keys: Sequence[BlockKey]) -> None:
        """Let threads read blocks that are to be fetched soon; returns at once."""
        self._under_way.begin([key for key in keys if not self.keeps(*key)], self._prepared)

    def _stacked(
        self, level: int, indices: Sequence[int], device: torch.device | str, dtype: torch.dtype | None
    ) -> torch.Tensor:
        if self.tiers.of_level(level) != "device":
            return super()._stacked(level, indices, device, dtype)
        place = (torch.device(device), dtype or self.dtype)
        if place != self._place:
            self._device.clear()
            self._place = place
        counts = self._counts["device"]
        return stacked([self._block(level, index, counts, self._device, place) for index in indices])

    @contextlib.contextmanager
    def _all_at_once(
        self, keys: Sequence[BlockKey], device: torch.device | str, dtype: torch.dtype | None
    ) -> Iterator[None]:
        """A disk has more than one answer at a time: what must be read is begun together, where it is worth a thread."""
        missing = [key for key in keys if not self.keeps(*key)]
        size = sum(self._files[level].record_bytes for level, _ in missing)
        begun = self._under_way.begin(missing, self._prepared, ahead=False) if size > _WORTH_THREADS else []
        try:
            yield
        finally:
            self._under_way.drop(begun)  # after an error; else they were taken

    def _versions(self, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        return tuple(self.checksum(*key) for key in keys)

    def _block(
        self,
        level: int,
        index: int,
        counts: TierStatistics,
        kept: KeptBlocks | None,
        place: tuple[torch.device, torch.dtype] | None = None,
    ) -> torch.Tensor:
        """A block from where it is kept, else read and kept there.

        Args:
            level: Of the block.
            index: Of the block.
            counts: Of the tier.
            kept: What the tier has; None if it keeps nothing.
            place: Device and dtype of what it keeps. Default: the CPU, as the file has it.
        """
        key = (level, index)
        found = None if kept is None else self._current(kept, key)
        if found is not None:
            counts.hits += 1
            return found.record
        read, ahead = self._under_way.taken(key, self.checksum(level, index))
        read = read or self._prepared(key)
        record = read.result()
        counts.misses += 1
        counts.ahead += ahead
        counts.read_bytes += record.nbytes
        if place is not None:
            record = record.to(*place)
        if kept is not None:
            kept.put(key, KeptBlock(record, read.checksum))
        return record

    def _current(self, kept: KeptBlocks, key: BlockKey) -> KeptBlock | None:
        """A block that is kept; None if it is not, or if another was written to the file since."""
        found = kept.get(key)
        if found is not None and found.checksum != self.checksum(*key):
            kept.drop(key)
            return None
        return found

    def _prepared(self, key: BlockKey) -> RecordRead:
        """Return what reads a block, or draws one that was never written or was deleted."""
        level, index = key
        read = self._files[level].prepare(index, mapped=self.tiers.of_level(level) == "disk")
        drawn = functools.partial(initial_block, self.layout, level, index, self.seed, self.dtype)
        return read or RecordRead(UNWRITTEN, self._files[level].record_bytes, drawn)

    def write(self, level: int, index: int, record: torch.Tensor) -> None:
        """Put the record of a block, `[numel]`, in its place."""
        assert self._writable, "the bank was opened to be read"
        self._files[level].write(index, record)
        self._drop(level, index)

    def forget(self, level: int, index: int) -> None:
        """Delete a block: its bytes are overwritten on the disk, and it starts again as one that was never written: it adds zero."""
        assert self._writable, "the bank was opened to be read"
        self._files[level].forget(index)
        self._drop(level, index)

    def written(self, level: int) -> list[int]:
        """Return the indices of the records of a level that were written, ascending.

        Raises:
            BankError: If the checksum of a record was lost, or a record is half written.
        """
        return self._files[level].written()

    def has_record(self, level: int, index: int) -> bool:
        """Whether there is anything of a block in its file, be it damaged."""
        return self.checksum(level, index) != UNWRITTEN

    def deleted(self, level: int) -> list[int]:
        """Return the indices of the records of a level that were deleted and not written since, ascending."""
        return self._files[level].deleted()

    def checksum(self, level: int, index: int) -> int:
        """Return the checksum of a block's record, or the mark in its place (`UNWRITTEN` for every block that has no record)."""
        checksum = self._files[level].checksum(index)
        return UNWRITTEN if checksum == DELETED else checksum

    def sync(self) -> None:
        """Force what was written to the disk."""
        for file in self._files.values():
            file.sync()

    def save(
        self,
        folder: str | os.PathLike,
        trained: Mapping[BlockKey, Callable[[], torch.Tensor]] | None = None,
        save_audit: Callable[[Path], None] | None = None,
        tree: str | None = None,
        tree_folder: Path | None = None,
        deleted: Collection[BlockKey] = (),
        link_from: Path | None = None,
    ) -> None:
        """Write the bank into another folder: what was never written, or was deleted, is a hole there.

        Args:
            folder: Made if need be; one that has this very bank is left as it is.
            trained: What returns the record of each block that is another than in this bank, by level and index. Default: none are.
            save_audit: Writes the record of what trained blocks to a file. Default: if this bank has one, it is copied.
            tree: Fingerprint of the tree by whose paths `trained` was trained. Default: that which this bank was trained with.
            deleted: Level and index of blocks that are deleted in the copy; they are not read. Default: those that are deleted here.
            tree_folder: The folder with the files of this tree, which go along. Default: that of this bank, which may have none.
            link_from: The folder of a copy, or of this bank: files of levels there that hold exactly what is to be written get a hard
                link in place of a copy, if the file system can. Default: every level is written.

        Raises:
            BankError: If somebody else writes to a bank there, or a block is not what was written.
        """
        folder = Path(folder)
        if self.lies_in(folder):
            return
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / BANK_DESCRIPTION).exists():
            if (held := lock(folder)) is not None:  # whoever writes there would lose it
                held.release()
            (folder / BANK_DESCRIPTION).unlink()  # written last: with it a bank is whole
            sync(folder)
        with _nobody_writes(link_from) as may_be_linked:
            for level in self._files:
                copy = LevelCopy(
                    self._files[level],
                    {index: read for (of_level, index), read in (trained or {}).items() if of_level == level},
                    frozenset(index for of_level, index in deleted if of_level == level),
                )
                path = folder / level_file(level)
                path.unlink(missing_ok=True)  # it may be a link of a file that others have
                if not (may_be_linked and link_from and copy.link(link_from / path.name, path)):
                    copy.write(path)
        (folder / BANK_AUDIT).unlink(missing_ok=True)
        if save_audit is not None:
            save_audit(folder / BANK_AUDIT)
        elif (self.folder / BANK_AUDIT).exists():
            with whole_file(folder / BANK_AUDIT) as partial:
                shutil.copyfile(self.folder / BANK_AUDIT, partial)
        self.save_tree(folder, tree_folder)
        write_description(folder, described_again(self.description, self.layout, tree or self.tree))

    def save_tree(self, folder: Path, tree_folder: Path | None = None) -> None:
        """Give a folder the files of the tree that blocks are trained with, and no other tree's.

        Args:
            folder: Of a bank.
            tree_folder: That has the files. Default: that of this bank, which may have none.
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
                else:  # a person may change the files of a tree where they lie
                    with whole_file(folder / name) as partial:
                        shutil.copyfile(source / name, partial)

    def lies_in(self, folder: str | os.PathLike) -> bool:
        """Whether a folder is that of this very bank."""
        return Path(folder).exists() and Path(folder).resolve() == self.folder.resolve()

    def close(self) -> None:
        """End its threads, close its files and forget what it keeps; nothing can be fetched afterwards."""
        self._threads.close()
        for kept in (self._memory, self._device):
            kept.clear()
        self._under_way.clear()
        self.changed()
        for file in self._files.values():
            file.close()
        if self._lock is not None:
            self._lock.release()

    def _drop(self, level: int, index: int) -> None:
        for kept in (self._memory, self._device):
            kept.drop((level, index))
        self._under_way.drop([(level, index)])
        self.changed()


@contextlib.contextmanager
def _nobody_writes(folder: Path | None) -> Iterator[bool]:
    """Keep others from writing to a bank in the meantime; false if somebody does, or there is no bank."""
    try:
        held = None if folder is None else Lock(folder / BANK_DESCRIPTION, shared=True)
    except OSError as error:
        yield has_no_locks(error)
        return
    try:
        yield held is not None
    finally:
        if held is not None:
            held.release()


def create_bank(folder: str | os.PathLike, layout: BankLayout, dtype: torch.dtype, seed: int) -> None:
    """Make a bank whose blocks were never written: a few pages of the disk, and four bytes for each block.

    Args:
        folder: Made if need be.
        layout: Of the bank.
        dtype: That blocks are stored in.
        seed: What blocks start as.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for level in layout.levels:
        create_level_file(folder / level_file(level), layout.num_records(level), layout.record_numel(level), dtype)
    write_description(folder, describe(layout, seed))
