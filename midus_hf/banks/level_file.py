"""The blocks of one level of a bank: a safetensors file of records, of which those that were never written are a hole."""

import json
import os
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PAGE = 4096
_PIECE = 2**22
"""Bytes that one thread reads and checks."""

_MOST_THREADS = 8
_POOLS: dict[int, ThreadPoolExecutor] = {}


class BankError(ValueError):
    """A bank that cannot be read, or does not belong to its model."""


class LevelFile:
    """Records of equal size, each with a checksum.

    The file holds two tensors, `checksums [records]`, uint32, 0 for what was never written, and `blocks [records, numel]`. Writing
    puts a record in its place first and then its checksum, so that a record that is half written is known by it.

    Args:
        path: Of the file.
        num_records: Expected.
        numel: Elements of a record, expected.
        writable: Whether records will be written. Default: false.

    Raises:
        BankError: If the file is absent, is none of these, is cut short, or has other sizes.
    """

    def __init__(self, path: Path, num_records: int, numel: int, writable: bool = False):
        self.path, self.num_records, self.numel = path, num_records, numel
        try:
            self._file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise BankError(
                f"bank file {path} cannot be opened ({error.strerror}); expected it beside the model."
            ) from None
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file).st_size
        try:
            (length,) = struct.unpack("<Q", os.pread(self._file, 8, 0))
            header: Any = json.loads(os.pread(self._file, length, 8)) if length < size else None
            checksums, blocks = header["checksums"], header["blocks"]
            self.dtype = _DTYPES[blocks["dtype"]]
            self._checksums_at = 8 + length + checksums["data_offsets"][0]
            self._blocks_at = 8 + length + blocks["data_offsets"][0]
            shape, end = blocks["shape"], 8 + length + blocks["data_offsets"][1]
        except (struct.error, ValueError, LookupError, TypeError, OverflowError):
            raise BankError(
                f"bank file {self.path} has no header of a bank; expected one. Copy the bank again."
            ) from None
        if shape != [self.num_records, self.numel]:
            raise BankError(
                f"bank file {self.path} has blocks of shape {shape}; expected {[self.num_records, self.numel]}. It belongs to "
                "another model."
            )
        if size < end:
            raise BankError(f"bank file {self.path} has {size:,} bytes; expected {end:,}. Copy the bank again.")

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return self.numel * self.dtype.itemsize

    def checksums(self) -> numpy.ndarray:
        """Of all records, `[records]`, uint32; 0 for what was never written."""
        return numpy.frombuffer(os.pread(self._file, 4 * self.num_records, self._checksums_at), dtype="<u4")

    def checksum(self, index: int) -> int:
        """Of one record; 0 if it was never written."""
        return struct.unpack("<I", os.pread(self._file, 4, self._checksums_at + 4 * index))[0]

    def read(self, index: int) -> torch.Tensor | None:
        """A record `[numel]`; None if it was never written.

        Raises:
            BankError: If it is not what was written.
        """
        expected = self.checksum(index)
        if expected == 0:
            return None
        record = torch.empty(self.numel, dtype=self.dtype)
        data = _bytes_of(record)

        def read_piece(start: int, end: int) -> int:
            self._read_at(index, start, data[start:end])
            return zlib.crc32(data[start:end])

        if _in_pieces(len(data), read_piece) != expected:
            raise BankError(
                f"block {index} of bank file {self.path} is not what was written: its checksum differs. Copy the bank again, or "
                "delete the block."
            )
        return record

    def _read_at(self, index: int, start: int, data: memoryview) -> None:
        """Fill `data` from a place within a record."""
        place = self._blocks_at + index * self.record_bytes + start
        while data:
            count = os.preadv(self._file, [data], place)
            if not count:
                raise BankError(f"bank file {self.path} ends within block {index}. Copy the bank again.")
            data, place = data[count:], place + count

    def write(self, index: int, record: torch.Tensor) -> None:
        """Put a record `[numel]` in its place, cast to the dtype of the file."""
        assert record.shape == (self.numel,)
        data = _bytes_of(record.detach().to("cpu", self.dtype).contiguous())
        self._write_at(self._checksums_at + 4 * index, struct.pack("<I", 0))
        self._write_at(self._blocks_at + index * self.record_bytes, data)
        self._write_at(self._checksums_at + 4 * index, struct.pack("<I", _checksum(data)))

    def forget(self, index: int) -> None:
        """Let a record be one that was never written."""
        self._write_at(self._checksums_at + 4 * index, struct.pack("<I", 0))

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write_at(self, place: int, data: bytes | memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], place + done)


def create_level_file(path: Path, num_records: int, numel: int, dtype: torch.dtype) -> None:
    """Make a file whose records were never written: it takes a page of the disk, and its checksums as they are written."""
    blocks_bytes = num_records * numel * dtype.itemsize
    header = {
        "checksums": {"dtype": "U32", "shape": [num_records], "data_offsets": [0, 4 * num_records]},
        "blocks": {
            "dtype": _NAMES[dtype],
            "shape": [num_records, numel],
            "data_offsets": [4 * num_records, 4 * num_records + blocks_bytes],
        },
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 4 * num_records + blocks_bytes)


def _checksum(data: bytes | memoryview) -> int:
    return _in_pieces(len(data), lambda start, end: zlib.crc32(data[start:end]))


def _in_pieces(count: int, checksum_of: Callable[[int, int], int]) -> int:
    """The CRC-32 of bytes, or, of more than a piece, that of the CRC-32s of pieces; never 0, which says that there is nothing.

    Pieces are read and checked by threads: a disk has more than one answer at a time, and a sum takes as long as reading.

    Args:
        count: Bytes in all.
        checksum_of: The CRC-32 of those between two places.
    """
    starts = range(0, count, _PIECE)
    if len(starts) <= 1:
        return checksum_of(0, count) or 1
    sums = list(_threads().map(lambda start: checksum_of(start, min(start + _PIECE, count)), starts))
    return zlib.crc32(struct.pack(f"<{len(sums)}I", *sums)) or 1


def _threads() -> ThreadPoolExecutor:
    """Those of this process: a process that was forked has none of its parent's."""
    process = os.getpid()
    if process not in _POOLS:
        _POOLS.clear()
        _POOLS[process] = ThreadPoolExecutor(max_workers=_MOST_THREADS, thread_name_prefix="bank")
    return _POOLS[process]


def _bytes_of(record: torch.Tensor) -> memoryview:
    """The memory of a contiguous record."""
    array: Any = record.view(torch.uint8).numpy()
    return memoryview(array).cast("B")
