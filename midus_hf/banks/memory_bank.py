"""A bank of memory blocks in files beside a checkpoint, of which texts fetch some."""

import collections
import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from midus_config.fetched_blocks import BANK_AUDIT, BANK_DESCRIPTION, BankLayout, level_file
from midus_hf.banks.block_reader import BlockReader
from midus_hf.banks.initial_blocks import initial_block
from midus_hf.banks.level_file import BankError, LevelFile, create_level_file

_FORMAT = 1
_CACHE_BYTES = 2**30


class MemoryBank(BlockReader):
    """The blocks of a memory: a file per level, read when a text asks for a block, and kept while there is room.

    Args:
        folder: Of the bank.
        layout: That the model's config implies.
        writable: Whether blocks will be written; nobody else can then. Default: false.
        cache_bytes: Of blocks that were read last, to keep. Default: 1 GB.

    Raises:
        BankError: If there is no bank, or that of another model, or somebody else writes to it.
    """

    def __init__(
        self, folder: str | os.PathLike, layout: BankLayout, writable: bool = False, cache_bytes: int = _CACHE_BYTES
    ):
        super().__init__(layout)
        self.folder = Path(folder)
        self.description = read_description(self.folder, layout)
        self.seed: int = self.description["seed"]
        self._lock = _lock(self.folder) if writable else None
        self._files: dict[int, LevelFile] = {}
        try:
            for level in layout.levels:
                path, records = self.folder / level_file(level), layout.num_records(level)
                self._files[level] = LevelFile(path, records, layout.record_numel(level), writable)
        except BaseException:
            self.close()
            raise
        self._cache: collections.OrderedDict[tuple[int, int], torch.Tensor] = collections.OrderedDict()
        self._cache_bytes, self._cached_bytes = cache_bytes, 0

    @property
    def dtype(self) -> torch.dtype:
        """That blocks are stored in."""
        return next(iter(self._files.values())).dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> "MemoryBank":
        """Itself: copies of a model read the same bank."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """The same bank, to be read: an open file is nothing to another process."""
        return MemoryBank, (self.folder.absolute(), self.layout, False, self._cache_bytes)

    def block(self, level: int, index: int) -> torch.Tensor:
        """The record of a block, `[numel]`, on the CPU; not to be changed.

        Args:
            level: Counted from 1.
            index: Of the node within the level, or, behind the last, the generic memory's.
        """
        key = (level, index)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        record = self._files[level].read(index)
        if record is None:
            record = initial_block(self.layout, level, index, self.seed, self.dtype)
        self._cache[key] = record
        self._cached_bytes += record.nbytes
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.nbytes
        return record

    def keeps(self, level: int, index: int) -> bool:
        """Whether a block is in memory, so that fetching it reads nothing."""
        return (level, index) in self._cache

    def write(self, level: int, index: int, record: torch.Tensor) -> None:
        """Put the record of a block, `[numel]`, in its place."""
        assert self._lock is not None, "the bank was opened to be read"
        self._files[level].write(index, record)
        self._drop(level, index)

    def forget(self, level: int, index: int) -> None:
        """Let a block be one that was never written, which adds zero."""
        assert self._lock is not None, "the bank was opened to be read"
        self._files[level].forget(index)
        self._drop(level, index)

    def written(self, level: int) -> list[int]:
        """Indices of the records of a level that were written, ascending."""
        return self._files[level].checksums().nonzero()[0].tolist()

    def checksum(self, level: int, index: int) -> int:
        """Of the record of a block; 0 if it was never written."""
        return self._files[level].checksum(index)

    def sync(self) -> None:
        """Force what was written to the disk."""
        for file in self._files.values():
            file.sync()

    def save(
        self,
        folder: str | os.PathLike,
        trained: Iterable[tuple[int, int, torch.Tensor]] = (),
        save_audit: Callable[[Path], None] | None = None,
    ) -> None:
        """Write the bank into another folder: what was never written stays a hole there.

        Args:
            folder: Made if need be; one that has this very bank is left as it is.
            trained: Level, index and record of blocks that are others than in this bank. Default: none are.
            save_audit: Writes the record of what trained blocks to a file. Default: if this bank has one, it is copied.

        Raises:
            BankError: If somebody else writes to a bank there, or a block is not what was written.
        """
        folder = Path(folder)
        if self.lies_in(folder):
            return
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / BANK_DESCRIPTION).exists():
            os.close(_lock(folder))  # whoever writes there would lose it
            (folder / BANK_DESCRIPTION).unlink()  # written last: with it a bank is whole
        with contextlib.ExitStack() as opened:
            copies = {}
            for level, file in self._files.items():
                path = folder / level_file(level)
                create_level_file(path, file.num_records, file.numel, file.dtype)
                copies[level] = LevelFile(path, file.num_records, file.numel, writable=True)
                opened.callback(copies[level].close)
                for index in self.written(level):
                    record = file.read(index)
                    assert record is not None
                    copies[level].write(index, record)
            for level, index, record in trained:
                copies[level].write(index, record)
            for copy in copies.values():
                copy.sync()
        (folder / BANK_AUDIT).unlink(missing_ok=True)
        if save_audit is not None:
            save_audit(folder / BANK_AUDIT)
        elif (self.folder / BANK_AUDIT).exists():
            shutil.copyfile(self.folder / BANK_AUDIT, folder / BANK_AUDIT)
        write_description(folder, self.description)

    def lies_in(self, folder: str | os.PathLike) -> bool:
        """Whether a folder is that of this very bank."""
        return Path(folder).exists() and Path(folder).resolve() == self.folder.resolve()

    def close(self) -> None:
        """Close its files; nothing can be fetched afterwards."""
        for file in self._files.values():
            file.close()
        if self._lock is not None:
            os.close(self._lock)

    def _drop(self, level: int, index: int) -> None:
        dropped = self._cache.pop((level, index), None)
        self._cached_bytes -= 0 if dropped is None else dropped.nbytes
        self.changed()


def create_bank(folder: str | os.PathLike, layout: BankLayout, dtype: torch.dtype, seed: int) -> None:
    """Make a bank whose blocks were never written: a few pages of the disk, whatever its size.

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
    write_description(folder, {"format": _FORMAT, "layout": layout.to_dict(), "seed": seed})


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write what tells the bank from others."""
    (folder / BANK_DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def read_description(folder: Path, layout: BankLayout) -> dict[str, Any]:
    """Read it, and compare it with what the model's config implies.

    Raises:
        BankError: If there is none, or it is that of another model.
    """
    path = folder / BANK_DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BankError(
            f"there is no memory bank in {folder} ({error.strerror}: {BANK_DESCRIPTION}); expected one beside the model."
        ) from None
    except ValueError:
        raise BankError(f"{path} is no JSON; expected the description of a bank. Copy the bank again.") from None
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise BankError(f"{path} has another format than {_FORMAT}; expected a bank that this version reads.")
    difference = _difference(description.get("layout"), layout.to_dict())
    if difference:
        raise BankError(
            f"the memory bank in {folder} belongs to another model: {difference}. Put the model's own there."
        )
    if type(description.get("seed")) is not int:
        raise BankError(f"{path} has the seed {description.get('seed')!r}; expected an integer. Copy the bank again.")
    return description


def _difference(found: Any, expected: dict[str, Any]) -> str | None:
    """The first thing that two layouts disagree in; None if they agree."""
    if not isinstance(found, dict):
        return f"its layout is {found!r}"
    for key, value in expected.items():
        if found.get(key) != value:
            return f"its {key} is {found.get(key)!r}; expected {value!r}"
    return None


def _lock(folder: Path) -> int:
    """Hold the bank for writing.

    Raises:
        BankError: If somebody else does.
    """
    file = os.open(folder / BANK_DESCRIPTION, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise BankError(f"the memory bank in {folder} is being written by another run. Wait for it.") from None
    return file
