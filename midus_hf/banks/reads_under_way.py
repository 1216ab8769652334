"""Blocks that are being read, or were read ahead, and have not been fetched yet."""

import collections
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from midus_hf.banks.reading_threads import ReadingThreads
from midus_hf.banks.record_read import RecordRead
from midus_hf.banks.tiers import BlockKey


class _UnderWay(NamedTuple):
    read: RecordRead
    ahead: bool


class ReadsUnderWay:
    """Reads of blocks that have been begun. Each block is read once, and a fetch waits for a read under way.

    Args:
        threads: Threads that read.
        room: Bytes for blocks that are read ahead. If they need more, the reads that were begun first are dropped.
    """

    def __init__(self, threads: ReadingThreads, room: int):
        self._threads, self._room = threads, room
        self._reads: collections.OrderedDict[BlockKey, _UnderWay] = collections.OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._of_this_process())

    def begin(
        self, keys: Iterable[BlockKey], prepared: Callable[[BlockKey], RecordRead], ahead: bool = True
    ) -> list[BlockKey]:
        """Let threads read the blocks that are not under way yet.

        Args:
            prepared: Function that returns the pending read of a block.
            ahead: Whether the reads are ahead of any fetch, and therefore limited to `room`. Default: true.

        Returns:
            The keys of the blocks whose reads were begun.
        """
        reads = self._of_this_process()
        begun = [key for key in keys if key not in reads]
        for key in begun:
            reads[key] = _UnderWay(prepared(key).begin(self._threads), ahead)
        held = sum(one.read.nbytes for one in reads.values() if one.ahead)
        for key in [key for key, one in reads.items() if one.ahead]:
            if held <= self._room:
                break
            held -= reads[key].read.nbytes
            self.drop([key])
        return begun

    def taken(self, key: BlockKey, checksum: int) -> tuple[RecordRead | None, bool]:
        """Remove and return the read of a block, and return whether the read was begun ahead of the fetch.

        Args:
            checksum: Checksum that the file now has for the block. A read that began with another checksum is
                discarded.

        Returns:
            The read and true or false; None and false if there is no usable read.
        """
        under_way = self._of_this_process().pop(key, None)
        if under_way is None or under_way.read.checksum != checksum:
            return None, False
        return under_way

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Cancel and remove the reads of the blocks that are under way."""
        for key in keys:
            under_way = self._of_this_process().pop(key, None)
            if under_way is not None:
                under_way.read.cancel()

    def clear(self) -> None:
        """Cancel and remove all reads."""
        self.drop(list(self._of_this_process()))

    def _of_this_process(self) -> collections.OrderedDict[BlockKey, _UnderWay]:
        """Return the reads of this process. A forked process drops its parent's reads, which would never finish there."""
        if self._process != os.getpid():
            self._reads.clear()
            self._process = os.getpid()
        return self._reads
