"""A record on its way from a file: read and checked by threads, in pieces."""

import struct
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from midus_hf.banks.reading_threads import ReadingThreads

UNWRITTEN, DELETED, HALF_WRITTEN = (int.from_bytes(mark, "little") for mark in (b"none", b"gone", b"half"))
"""What a record without a checksum has in its place; 0 is not among them, since damage leaves pages of zeros."""

_NO_CHECKSUMS = frozenset({0, UNWRITTEN, DELETED, HALF_WRITTEN})
_PIECE = 2**22
"""Bytes that one thread reads and checks."""


class RecordRead:
    """A record that is being read; whoever wants it waits for it.

    Args:
        checksum: That the file had for the record when reading began, or the mark in its place.
        nbytes: Of the record.
        record: Where it goes, `[numel]`, or what makes it.
        work: Called with two places in bytes for each piece: reads it, and returns its CRC-32. None where `record` makes it.
        fail: Raises the error that tells of a wrong checksum.
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
        """Let threads read it from now on; returns at once."""
        if self._work is None:
            assert callable(self._record)
            self._begun = [threads.submit(self._record)]
        else:
            self._begun = [threads.submit(self._work, *piece) for piece in pieces(self.nbytes)]
        return self

    def cancel(self) -> None:
        """Read no more of it than threads have begun to."""
        for piece in self._begun or ():
            piece.cancel()

    def result(self) -> torch.Tensor:
        """The record, `[numel]`, once it is there; if nobody has begun to read it, it is read now.

        Raises:
            BankError: If it cannot be read, or is not what was written.
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
    """The places at which the pieces of so many bytes begin and end."""
    return [(start, min(start + _PIECE, count)) for start in range(0, count, _PIECE)] or [(0, 0)]


def crc_of(record: torch.Tensor) -> int:
    """Return the checksum of a record that is in memory."""
    data = record.contiguous().view(torch.uint8).numpy().tobytes()
    return checksum_of([zlib.crc32(data[start:end]) for start, end in pieces(len(data))])


def checksum_of(sums: list[int]) -> int:
    """Return the checksum of a record: the CRC-32 of its only piece, or the CRC-32 of the CRC-32s of its pieces.

    A checksum that would be 0 or a mark differs from that in its lowest bit.
    """
    checksum = sums[0] if len(sums) == 1 else zlib.crc32(struct.pack(f"<{len(sums)}I", *sums))
    return checksum ^ 1 if checksum in _NO_CHECKSUMS else checksum
