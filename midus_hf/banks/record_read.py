"""A record that is being read from a file: threads read and check it in pieces."""

import struct
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from midus_hf.banks.reading_threads import ReadingThreads

# The marks that stand in place of a checksum. 0 is not a mark, since file system damage leaves pages of zeros.
UNWRITTEN, DELETED, HALF_WRITTEN = (int.from_bytes(mark, "little") for mark in (b"none", b"gone", b"half"))

_NO_CHECKSUMS = frozenset({0, UNWRITTEN, DELETED, HALF_WRITTEN})
# Bytes that one thread reads and checks at a time.
_PIECE = 2**22


class RecordRead:
    """The read of one record, which may be under way in threads. `result` waits for the record.

    Args:
        checksum: The checksum, or the mark in its place, that the file had for the record when the read was prepared.
        nbytes: Size of the record in bytes.
        record: Tensor to fill, `[numel]`, or, without `work`, a function that returns the record.
        work: Function that reads the bytes from a start to an end and returns their CRC-32. Default: None; `record` is
            called instead.
        fail: Function that raises the error of a wrong checksum.
    """

    def __init__(
        self,
        checksum: int,
        nbytes: int,
        record: torch.Tensor | Callable[[], torch.Tensor],
        work: Callable[[int, int], int] | None = None,
        fail: Callable[[], Any] = lambda: None,
    ):
        self.checksum, self.nbytes = checksum, nbytes
        self._record, self._work, self._fail = record, work, fail
        self._begun: list[Future] | None = None

    def begin(self, threads: ReadingThreads) -> "RecordRead":
        """Let threads read the record from now on, and return at once."""
        if self._work is None:
            assert callable(self._record)
            self._begun = [threads.submit(self._record)]
        else:
            self._begun = [threads.submit(self._work, *piece) for piece in pieces(self.nbytes)]
        return self

    def cancel(self) -> None:
        """Drop the pieces that no thread has begun to read."""
        for piece in self._begun or ():
            piece.cancel()

    def result(self) -> torch.Tensor:
        """Return the record, `[numel]`, once it is read. If `begin` was not called, the record is read now.

        Raises:
            BankError: If the record cannot be read or does not match its checksum.
        """
        if self._work is None:
            assert callable(self._record)
            return self._record() if self._begun is None else self._begun[0].result()
        assert isinstance(self._record, torch.Tensor)
        if self._begun is None:
            sums = [self._work(*piece) for piece in pieces(self.nbytes)]
        else:
            sums = [piece.result() for piece in self._begun]
        if checksum_of(sums) != self.checksum:
            self._fail()
        return self._record


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
