"""A bank of memory blocks in files beside a checkpoint, of which each text fetches a few."""

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

from midus_hf.banks.bank_description import describe, described_again, lock, read_description, write_description
from midus_hf.banks.block_reader import BlockReader, stacked
from midus_hf.banks.initial_blocks import initial_block
from midus_hf.banks.level_file import LevelCopy, LevelFile, create_level_file
from midus_hf.banks.record_read import DELETED, UNWRITTEN, ReadsUnderWay, RecordRead
from midus_hf.banks.tiers import TIERS, BankTiers, BlockKey, KeptBlock, KeptBlocks, Tier, TierStatistics
from midus_hf.config.fetched_blocks import BANK_AUDIT, BANK_DESCRIPTION, TREE_FILES, BankLayout, level_file
from midus_hf.files.locks import Lock, has_no_locks
from midus_hf.files.whole_files import link_or_copy, sync, whole_file

# Number of bytes from which on several threads read faster than one.
_WORTH_THREADS = 2**20


class MemoryBank(BlockReader):
    """Blocks of a memory in one file per level. Blocks are read when fetched, and kept while there is room.

    Only one thread may fetch. On a device, blocks are kept for one device and dtype at a time: the device and dtype of
    the last fetch.

    Args:
        layout: Layout that the model's config implies.
        writable: Whether blocks will be written. Nobody else can write to the bank then. Default: false.
        cache_bytes: Bytes of recently read blocks to keep in memory; replaces `memory_bytes` of `tiers`. Default: None,
            to leave `memory_bytes` as it is.
        tiers: Tier of each level, as `BankTiers` or a mapping of its arguments. Default: memory for all levels, with 1
            GB.

    Raises:
        BankError: If there is no bank, the bank belongs to another model, or `writable` is true and another run is
            writing.
        ValueError: If the tiers do not fit the tree.
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
        rooms = {"device": self.tiers.device_bytes, "memory": self.tiers.memory_bytes, "disk": 0}
        self._kept = {tier: KeptBlocks(rooms[tier]) for tier in TIERS}
        self._device_and_dtype: tuple[torch.device, torch.dtype] | None = None
        self._under_way = ReadsUnderWay(self.tiers.ahead_bytes)
        self._counts = {tier: TierStatistics() for tier in TIERS}
        self._writable = writable
        self._lock = lock(self.folder) if writable else None
        self._files: dict[int, LevelFile] = {}
        try:
            for level in layout.levels:
                path, records = self.folder / level_file(level), layout.num_records(level)
                self._files[level] = LevelFile(path, records, layout.record_numel(level), writable)
        except BaseException:
            self.close()
            raise
        weakref.finalize(self, self._under_way.clear)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the blocks are stored."""
        return next(iter(self._files.values())).dtype

    @property
    def tree(self) -> str | None:
        """Fingerprint of the tree whose paths trained the blocks; None if unknown, as before any training."""
        return self.description.get("tree")

    def __deepcopy__(self, memo: dict[int, Any]) -> "MemoryBank":
        """Return this bank itself: copies of a model share one bank."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the call by which another process opens the same bank, read-only: open files cannot be passed to a process."""
        return MemoryBank, (self.folder.absolute(), self.layout, False, None, self.tiers)

    def block(self, level: int, index: int) -> torch.Tensor:
        """Return the record of a block, as `BlockReader.block`."""
        return self._block(level, index, "disk" if self.tiers.of_level(level) == "disk" else "memory")

    def keeps(self, level: int, index: int) -> bool:
        """Return whether a block is kept in memory or on a device, so that a fetch needs no read."""
        return any(self._current(kept, (level, index)) is not None for kept in self._kept.values())

    def statistics(self) -> dict[str, TierStatistics]:
        """Return the counts of hits, misses and bytes per tier since the bank was opened."""
        return {tier: replace(counts, held_bytes=self._kept[tier].held_bytes) for tier, counts in self._counts.items()}

    def read_ahead(self, keys: Sequence[BlockKey]) -> None:
        """Start reading blocks in threads, ahead of their fetch, and return at once."""
        self._under_way.begin([key for key in keys if not self.keeps(*key)], self._prepared)

    def _stacked(
        self, level: int, indices: Sequence[int], device: torch.device | str, dtype: torch.dtype | None
    ) -> torch.Tensor:
        if self.tiers.of_level(level) != "device":
            return super()._stacked(level, indices, device, dtype)
        device_and_dtype = (torch.device(device), dtype or self.dtype)
        if device_and_dtype != self._device_and_dtype:
            self._kept["device"].clear()
            self._device_and_dtype = device_and_dtype
        return stacked([self._block(level, index, "device", device_and_dtype) for index in indices])

    @contextlib.contextmanager
    def _all_at_once(
        self, keys: Sequence[BlockKey], device: torch.device | str, dtype: torch.dtype | None
    ) -> Iterator[None]:
        """Begin the reads of a fetch together, if they are large enough for threads: a disk can answer several at a time."""
        missing = [key for key in keys if not self.keeps(*key)]
        size = sum(self._files[level].record_bytes for level, _ in missing)
        begun = self._under_way.begin(missing, self._prepared, ahead=False) if size > _WORTH_THREADS else []
        try:
            yield
        finally:
            self._under_way.drop(begun)  # only an error leaves reads here; otherwise the fetch took them all

    def _versions(self, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        return tuple(self.checksum(*key) for key in keys)

    def _block(
        self, level: int, index: int, tier: Tier, device_and_dtype: tuple[torch.device, torch.dtype] | None = None
    ) -> torch.Tensor:
        """Return a block that its tier keeps, or else read the block and let the tier keep it on a device in a dtype."""
        key, counts, kept = (level, index), self._counts[tier], self._kept[tier]
        kept_block = self._current(kept, key)
        if kept_block is not None:
            counts.hits += 1
            return kept_block.record
        read = self._under_way.taken(key, self.checksum(level, index)) or self._prepared(key)
        record = read.result()
        counts.misses += 1
        counts.ahead += read.ahead
        counts.read_bytes += record.nbytes
        if device_and_dtype is not None:
            record = record.to(*device_and_dtype)
        kept.put(key, KeptBlock(record, read.checksum))
        return record

    def _current(self, kept: KeptBlocks, key: BlockKey) -> KeptBlock | None:
        """Return a kept block; None if the block is not kept, or has been written to the file again since."""
        kept_block = kept.get(key)
        if kept_block is not None and kept_block.checksum != self.checksum(*key):
            kept.drop(key)
            return None
        return kept_block

    def _prepared(self, key: BlockKey) -> RecordRead:
        """Return the pending read of a block. A block that was never written, or was deleted, is drawn instead."""
        level, index = key
        read = self._files[level].prepare(index, mapped=self.tiers.of_level(level) == "disk")
        drawn = functools.partial(initial_block, self.layout, level, index, self.seed, self.dtype)
        return read or RecordRead(UNWRITTEN, self._files[level].record_bytes, [drawn], lambda records: records[0])

    def write(self, level: int, index: int, record: torch.Tensor) -> None:
        """Write the record of a block, `[numel]`."""
        assert self._writable, "the bank was opened to be read"
        self._files[level].write(index, record)
        self._drop(level, index)

    def forget(self, level: int, index: int) -> None:
        """Delete a block: overwrite its bytes on the disk. The block starts again as an unwritten block, which adds zero."""
        assert self._writable, "the bank was opened to be read"
        self._files[level].forget(index)
        self._drop(level, index)

    def written(self, level: int) -> list[int]:
        """Return the indices of a level's written records, ascending.

        Raises:
            BankError: If a record's checksum was lost, or a record is half written.
        """
        return self._files[level].written()

    def has_record(self, level: int, index: int) -> bool:
        """Return whether the file holds anything for a block, even a damaged record."""
        return self.checksum(level, index) != UNWRITTEN

    def deleted(self, level: int) -> list[int]:
        """Return the indices of a level's records that were deleted and not written again, ascending."""
        return self._files[level].deleted()

    def checksum(self, level: int, index: int) -> int:
        """Return the checksum of a block's record, or the mark in its place, which is `UNWRITTEN` for deleted blocks too."""
        checksum = self._files[level].checksum(index)
        return UNWRITTEN if checksum == DELETED else checksum

    def sync(self) -> None:
        """Flush all writes to the disk."""
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
        """Write the bank into another folder. Blocks that were never written, or were deleted, are holes there.

        Args:
            folder: Folder of the copy, which is created if missing. If this bank lies in the folder, nothing is done.
            trained: For each changed block, by level and index, a function that returns the new record. Default: no
                changes.
            save_audit: Function that writes the audit of the copy to a file. Default: this bank's audit is copied, if
                any.
            tree: Fingerprint of the tree whose paths trained `trained`. Default: the tree of this bank.
            tree_folder: Folder with the files of that tree, which are copied along. Default: this bank's folder, which
                may have none.
            deleted: Level and index of further blocks to delete in the copy. These blocks are not read. Default: none;
                blocks deleted in this bank stay deleted.
            link_from: Folder of this bank or of a copy. A level's file there that equals the file to be written is
                hard-linked instead of written, if the file system allows. Default: None; every level is written.

        Raises:
            BankError: If another run is writing to a bank in `folder`, or a block does not match its checksum.
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
        with _nobody_writes(link_from) as may_be_linked:
            for level in self._files:
                copy = LevelCopy(
                    self._files[level],
                    {index: read for (of_level, index), read in (trained or {}).items() if of_level == level},
                    frozenset(index for of_level, index in deleted if of_level == level),
                )
                path = folder / level_file(level)
                path.unlink(missing_ok=True)  # other folders may link the same file, which must not be overwritten
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
        """Close the files and drop all kept blocks and all reads under way. Nothing can be fetched afterwards."""
        for kept in self._kept.values():
            kept.clear()
        self._under_way.clear()
        self.changed()
        for file in self._files.values():
            file.close()
        if self._lock is not None:
            self._lock.release()

    def _drop(self, level: int, index: int) -> None:
        for kept in self._kept.values():
            kept.drop((level, index))
        self._under_way.drop([(level, index)])
        self.changed()


@contextlib.contextmanager
def _nobody_writes(folder: Path | None) -> Iterator[bool]:
    """Keep others from writing to a bank, and yield true; or yield false if there is no bank, or another run is writing."""
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
    """Create a bank of unwritten blocks, which start by the seed. The bank takes a few pages of disk, and four bytes per block."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for level in layout.levels:
        create_level_file(folder / level_file(level), layout.num_records(level), layout.record_numel(level), dtype)
    write_description(folder, describe(layout, seed))
