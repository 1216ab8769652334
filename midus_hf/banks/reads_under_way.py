"""Blocks that are being read, or were read ahead, and that nobody has fetched yet."""

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
    """Blocks on their way, each read once: who fetches it waits for what is under way.

    Args:
        threads: That read.
        room: For what is read ahead, in bytes; what was begun longest ago gives way.
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
        """Let threads read blocks that are not under way.

        Args:
            keys: Of the blocks.
            prepared: Gives what reads one.
            ahead: Whether nobody waits for them yet: they then take no more room than there is. Default: true.

        Returns:
            Those that were begun.
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
        """What reads a block, which is under way no longer, and whether it was begun ahead of the fetch.

        Args:
            key: Of the block.
            checksum: That the file has for it now; what was read of another does not serve.
        """
        found = self._of_this_process().pop(key, None)
        if found is None or found.read.checksum != checksum:
            return None, False
        return found

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Read blocks no longer, those that are under way."""
        for key in keys:
            found = self._of_this_process().pop(key, None)
            if found is not None:
                found.read.cancel()

    def clear(self) -> None:
        """Read nothing any longer."""
        self.drop(list(self._of_this_process()))

    def _of_this_process(self) -> collections.OrderedDict[BlockKey, _UnderWay]:
        """A process that was forked has none of its parent's threads: what they were about to read never arrives."""
        if self._process != os.getpid():
            self._reads.clear()
            self._process = os.getpid()
        return self._reads
