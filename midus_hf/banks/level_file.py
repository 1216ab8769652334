"""The blocks of one level of a bank: a safetensors file of records, in which unwritten records are a hole."""

import contextlib
import functools
import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from midus_hf.banks.record_read import DELETED, HALF_WRITTEN, UNWRITTEN, RecordRead, checksum_of, pieces, submit
from midus_hf.files.json_text import parse_json
from midus_hf.files.whole_files import have_own_file, punch_hole

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PAGE = 4096
_MARKS_AT_ONCE = 2**20
_ZEROS_AT_ONCE = 2**22


class BankError(ValueError):
    """A bank that cannot be read, or does not belong to its model."""


class LevelFile:
    """File of records of equal size, each with a checksum.

    The file holds two tensors: `checksums [records]`, uint32, and `blocks [records, numel]`. A record without a
    checksum has one of three marks instead, of four letters each: `none` if the record was never written, `gone` if the
    record was deleted, and `half` while the record is being written, so that an interrupted write is recognised later.
    0 is neither a checksum nor a mark: if the file system lost a page of checksums, or the file was copied with a hole
    there, the records of that page are refused.

    Args:
        num_records: Expected number of records.
        numel: Expected number of elements per record.
        writable: Whether records will be written. If the file has other names (hard links), the file is first replaced
            by a copy, so that writes do not reach the other names. Default: false.

    Raises:
        BankError: If the file is missing, truncated, not a bank's file, or of other sizes.
    """

    def __init__(self, path: Path, num_records: int, numel: int, writable: bool = False):
        self.path, self.num_records, self.numel, self.writable = path, num_records, numel, writable
        if writable:
            have_own_file(path)
        try:
            self._file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise BankError(
                f"bank file {path} cannot be opened ({error.strerror}); expected it beside the model."
            ) from None
        self._closing = weakref.finalize(self, os.close, self._file)  # closes the file even if nobody calls `close`
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file).st_size
        try:
            (length,) = struct.unpack("<Q", os.pread(self._file, 8, 0))
            header: Any = parse_json(os.pread(self._file, length, 8)) if length < size else None
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
        """Size of a record in bytes."""
        return self.numel * self.dtype.itemsize

    def checksums(self) -> numpy.ndarray:
        """Return the checksum of every record, or the mark in its place, `[records]`, uint32."""
        return numpy.frombuffer(os.pread(self._file, 4 * self.num_records, self._checksums_at), dtype="<u4")

    def checksum(self, index: int) -> int:
        """Return the checksum of one record, or the mark in its place; 0 if the checksum was lost."""
        return struct.unpack("<I", os.pread(self._file, 4, self._checksums_at + 4 * index))[0]

    def written(self, without: Collection[int] = ()) -> list[int]:
        """Return the indices of the written records, ascending.

        Args:
            without: Indices to leave out, whatever their state. Default: none.

        Raises:
            BankError: If a record's checksum was lost, or a record is half written.
        """
        checksums = self.checksums().copy()
        checksums[list(without)] = UNWRITTEN
        for index in numpy.isin(checksums, (0, HALF_WRITTEN)).nonzero()[0].tolist():
            self._check_mark(index, int(checksums[index]))
        return (~numpy.isin(checksums, (UNWRITTEN, DELETED))).nonzero()[0].tolist()

    def deleted(self) -> list[int]:
        """Return the indices of records that were deleted and not written again, ascending."""
        return (self.checksums() == DELETED).nonzero()[0].tolist()

    def is_written(self, index: int) -> bool:
        """Return whether a record was written and not deleted since. A lost checksum or a half-written record is a `BankError`."""
        checksum = self.checksum(index)
        self._check_mark(index, checksum)
        return checksum not in (UNWRITTEN, DELETED)

    def _check_mark(self, index: int, checksum: int) -> Any:
        """Raise an error if the checksum of a record was lost or the record is half written."""
        if checksum == 0:
            raise BankError(
                f"block {index} of bank file {self.path} has lost its checksum: there are zeros in its place, which a bank never "
                "writes. Copy the bank again, or delete the block."
            )
        if checksum == HALF_WRITTEN:
            raise BankError(
                f"block {index} of bank file {self.path} is half written: a process ended while it wrote it. Copy the bank again, "
                "or delete the block."
            )

    def read(self, index: int) -> torch.Tensor | None:
        """Return a record, `[numel]`, or None if the record was never written or was deleted.

        Raises:
            BankError: If the record cannot be read or does not match its checksum.
        """
        read = self.prepare(index)
        if read is None:
            return None
        return (read.begin() if len(pieces(self.record_bytes)) > 1 else read).result()

    def prepare(self, index: int, mapped: bool = False) -> RecordRead | None:
        """Return the pending read of a record, whose `result` raises the faults, or None if the record is unwritten or deleted.

        Args:
            mapped: Whether the record may be memory-mapped instead of copied. A mapped record takes no memory itself, and shows
                what others write to the file. Ignored if the file is writable. Default: false.
        """
        expected = self.checksum(index)
        if expected in (UNWRITTEN, DELETED):
            return None
        if expected in (0, HALF_WRITTEN):
            return RecordRead(expected, self.record_bytes, [], lambda _: self._check_mark(index, expected))
        # Records that were fetched earlier must not change when this object writes, so a writable file is not mapped.
        record = self._mapped(index) if mapped and not self.writable else None
        record, is_there = (torch.empty(self.numel, dtype=self.dtype), False) if record is None else (record, True)
        data = _bytes_of(record)

        def work(start: int, end: int) -> int:
            if not is_there:
                self._read_at(index, start, data[start:end])
            return zlib.crc32(data[start:end])

        def finish(sums: list[int]) -> torch.Tensor:
            if checksum_of(sums) != expected:
                raise BankError(
                    f"block {index} of bank file {self.path} is not what was written: its checksum differs. Copy the bank again, or "
                    "delete the block."
                )
            return record

        spans = pieces(self.record_bytes)
        return RecordRead(expected, self.record_bytes, [functools.partial(work, *span) for span in spans], finish)

    def _mapped(self, index: int) -> torch.Tensor | None:
        """Return a record memory-mapped from the file; None if the record's offset is not a multiple of its element size."""
        start = self._blocks_at + index * self.record_bytes
        if start % self.dtype.itemsize:
            return None
        within = start % mmap.ALLOCATIONGRANULARITY
        try:
            pages = mmap.mmap(self._file, within + self.record_bytes, access=mmap.ACCESS_COPY, offset=start - within)
        except ValueError:
            raise BankError(f"bank file {self.path} ends within block {index}. Copy the bank again.") from None
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            pages.madvise(mmap.MADV_SEQUENTIAL)
        return torch.frombuffer(pages, dtype=self.dtype, count=self.numel, offset=within)

    def _read_at(self, index: int, start: int, data: memoryview) -> None:
        """Fill `data` with the bytes of a record from byte `start` of the record."""
        position = self._blocks_at + index * self.record_bytes + start
        while data:
            try:
                count = os.preadv(self._file, [data], position)
            except OSError as error:
                raise BankError(
                    f"block {index} of bank file {self.path} cannot be read ({error.strerror}); expected an open file on a disk that "
                    "answers. Open the bank again."
                ) from error
            if not count:
                raise BankError(f"bank file {self.path} ends within block {index}. Copy the bank again.")
            data, position = data[count:], position + count

    def write(self, index: int, record: torch.Tensor) -> None:
        """Write a record, `[numel]`, cast to the dtype of the file."""
        assert record.shape == (self.numel,)
        data = _bytes_of(record.detach().to("cpu", self.dtype).contiguous())
        self._put_checksum(index, HALF_WRITTEN)
        self._write_at(self._blocks_at + index * self.record_bytes, data)
        self._put_checksum(index, self._checksum(data))

    def forget(self, index: int) -> None:
        """Delete a record: overwrite its bytes with zeros and mark the record as deleted.

        The zeros reach the disk before the mark does. If a process or the machine stops in between, the record is
        either unchanged or refused on reading until it is deleted again. On file systems that can make holes, the space
        is freed.
        """
        if self.checksum(index) not in (UNWRITTEN, DELETED):
            start, zeros = self._blocks_at + index * self.record_bytes, bytes(min(self.record_bytes, _ZEROS_AT_ONCE))
            for offset in range(0, self.record_bytes, _ZEROS_AT_ONCE):
                self._write_at(start + offset, zeros[: self.record_bytes - offset])
            self.sync()
            punch_hole(self._file, start, self.record_bytes)
            self.sync()
        self._put_checksum(index, DELETED)

    def sync(self) -> None:
        """Flush all writes to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        self._closing()
        self._file = -1  # the system may soon give the old descriptor's number to another file

    def _checksum(self, data: memoryview) -> int:
        spans = pieces(len(data))
        if len(spans) == 1:
            return checksum_of([zlib.crc32(data)])
        sums = [submit(functools.partial(zlib.crc32, data[start:end])) for start, end in spans]
        return checksum_of([future.result() for future in sums])

    def _put_checksum(self, index: int, checksum: int) -> None:
        """Write the checksum of a record, or a mark in its place."""
        self._write_at(self._checksums_at + 4 * index, struct.pack("<I", checksum))

    def _write_at(self, position: int, data: bytes | memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], position + done)


class LevelCopy:
    """Copy of a level in which some blocks are replaced or deleted, to be written to a file or hard-linked to an equal one.

    Args:
        source: The level's file in the bank.
        trained: For each replaced block, by index, a function that returns the new record, `[numel]`. The record is
            cast to the dtype of the level.
        left_out: Indices of blocks that are deleted in the copy. These blocks are not read.
    """

    def __init__(
        self, source: LevelFile, trained: Mapping[int, Callable[[], torch.Tensor]], left_out: Collection[int]
    ):
        self._source, self._trained = source, trained
        self._kept = [index for index in source.written(left_out) if index not in trained]
        self._deleted = sorted({*left_out, *source.deleted()} - trained.keys())

    def _record(self, index: int) -> torch.Tensor:
        if index in self._trained:
            return self._trained[index]().detach().to("cpu", self._source.dtype)
        record = self._source.read(index)
        assert record is not None
        return record

    def write(self, path: Path) -> None:
        """Write the copy over a file, and flush the file to the disk. Every block of the source is checked."""
        source = self._source
        create_level_file(path, source.num_records, source.numel, source.dtype)
        with contextlib.closing(LevelFile(path, source.num_records, source.numel, writable=True)) as copy:
            for index in self._deleted:
                copy.forget(index)
            for index in (*self._kept, *self._trained):
                copy.write(index, self._record(index))
            copy.sync()

    def link(self, file: Path, path: Path) -> bool:
        """Make a hard link at a new path to a level's file if its records equal this copy, and return whether that was done.

        A damaged file, or one that is not a level's, is not linked.
        """
        try:
            if not self._is_in(file):
                return False
            os.link(os.path.realpath(file), path)
        except (BankError, OSError):  # a file system may have no links, or have reached their limit
            return False
        return True

    def _is_in(self, file: Path) -> bool:
        source = self._source
        with contextlib.closing(LevelFile(file, source.num_records, source.numel)) as other:
            return (
                other.dtype == source.dtype
                and other.deleted() == self._deleted
                and other.written() == sorted([*self._kept, *self._trained])
                # Trained blocks come first: they are the likeliest to differ.
                and all(_same_bytes(other.read(index), self._record(index)) for index in (*self._trained, *self._kept))
            )


def create_level_file(path: Path, num_records: int, numel: int, dtype: torch.dtype) -> None:
    """Create a file of unwritten records. The file takes one page of disk space and four bytes per record."""
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
        for start in range(0, num_records, _MARKS_AT_ONCE):
            file.write(struct.pack("<I", UNWRITTEN) * min(_MARKS_AT_ONCE, num_records - start))
        file.truncate(8 + len(text) + 4 * num_records + blocks_bytes)


def _bytes_of(record: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous record."""
    array: Any = record.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def _same_bytes(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))
