"""Records that are being read from files: threads read and check them in pieces, since a disk answers several requests at a time."""

import functools
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from midus_hf.banks.tiers import BlockKey

# The marks that stand in place of a checksum. 0 is not a mark, since file system damage leaves pages of zeros.
UNWRITTEN, DELETED, HALF_WRITTEN = (int.from_bytes(mark, "little") for mark in (b"none", b"gone", b"half"))

_NO_CHECKSUMS = frozenset({0, UNWRITTEN, DELETED, HALF_WRITTEN})
# Bytes that one thread reads and checks at a time.
_PIECE = 2**22
_MOST_THREADS = 8


class RecordRead:
    """The read of one record, which may be under way in threads. `result` waits for the record.

    Args:
        checksum: The checksum, or the mark in its place, that the file had for the record when the read was prepared.
        nbytes: Size of the record in bytes.
        work: Functions that read the pieces of the record. They must not refer to a bank, which could then not be
            garbage-collected.
        finish: Function that takes the results of `work` and returns the record, `[numel]`.
    """

    def __init__(
        self,
        checksum: int,
        nbytes: int,
        work: Sequence[Callable[[], Any]],
        finish: Callable[[list[Any]], torch.Tensor],
    ):
        self.checksum, self.nbytes = checksum, nbytes
        # Whether the read was begun ahead of any fetch.
        self.ahead = False
        self._work, self._finish = work, finish
        self._begun: list[Future] | None = None

    def begin(self, ahead: bool = False) -> "RecordRead":
        """Let threads read the record from now on, and return at once."""
        self.ahead, self._begun = ahead, [submit(piece) for piece in self._work]
        return self

    def cancel(self) -> None:
        """Drop the pieces that no thread has begun to read."""
        for piece in self._begun or ():
            piece.cancel()

    def result(self) -> torch.Tensor:
        """Return the record, `[numel]`, once it is read and checked. If `begin` was not called, the record is read now."""
        if self._begun is None:
            return self._finish([piece() for piece in self._work])
        return self._finish([piece.result() for piece in self._begun])


class ReadsUnderWay:
    """Reads of blocks that have been begun. Each block is read once, and a fetch waits for a read under way.

    Args:
        room: Bytes for blocks that are read ahead. If they need more, the reads that were begun first are dropped.
    """

    def __init__(self, room: int):
        self._room = room
        self._reads: dict[BlockKey, RecordRead] = {}
        self._process = os.getpid()

    def begin(
        self, keys: Iterable[BlockKey], prepared: Callable[[BlockKey], RecordRead], ahead: bool = True
    ) -> list[BlockKey]:
        """Let threads read the blocks that are not under way yet, and return the keys of these blocks.

        Args:
            prepared: Function that returns the pending read of a block.
            ahead: Whether the reads are ahead of any fetch, and therefore limited to `room`. Default: true.
        """
        reads = self._of_this_process()
        begun = [key for key in keys if key not in reads]
        for key in begun:
            reads[key] = prepared(key).begin(ahead)
        held = sum(read.nbytes for read in reads.values() if read.ahead)
        for key in [key for key, read in reads.items() if read.ahead]:
            if held <= self._room:
                break
            held -= reads[key].nbytes
            self.drop([key])
        return begun

    def taken(self, key: BlockKey, checksum: int) -> RecordRead | None:
        """Remove and return the read of a block; None if there is none, or the file has another checksum for the block by now."""
        read = self._of_this_process().pop(key, None)
        return None if read is None or read.checksum != checksum else read

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Cancel and remove the reads of the blocks that are under way."""
        for key in keys:
            if (read := self._of_this_process().pop(key, None)) is not None:
                read.cancel()

    def clear(self) -> None:
        """Cancel and remove all reads."""
        self.drop(list(self._of_this_process()))

    def _of_this_process(self) -> dict[BlockKey, RecordRead]:
        """Return the reads of this process. A forked process drops its parent's reads, which would never finish there."""
        if self._process != os.getpid():
            self._reads.clear()
            self._process = os.getpid()
        return self._reads


def submit(work: Callable[[], Any]) -> Future:
    """Let a thread call `work`. All banks of a process share its threads."""
    return _threads(os.getpid()).submit(work)


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process. A forked process has none of its parent's threads."""
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="bank")


def pieces(count: int) -> list[tuple[int, int]]:
    """Return the first byte and the end of each piece of a record of `count` bytes."""
    return [(start, min(start + _PIECE, count)) for start in range(0, count, _PIECE)] or [(0, 0)]


def crc_of(record: torch.Tensor) -> int:
    """Return the checksum of a record in memory."""
    data = record.contiguous().view(torch.uint8).numpy().tobytes()
    return checksum_of([zlib.crc32(data[start:end]) for start, end in pieces(len(data))])


def checksum_of(sums: list[int]) -> int:
    """Return the checksum of a record: the CRC-32 of its only piece, or the CRC-32 of the CRC-32s of its pieces.

    If the result would be 0 or a mark, its lowest bit is flipped.
    """
    checksum = sums[0] if len(sums) == 1 else zlib.crc32(struct.pack(f"<{len(sums)}I", *sums))
    return checksum ^ 1 if checksum in _NO_CHECKSUMS else checksum
