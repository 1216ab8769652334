"""The blocks of one level of a bank: a safetensors file of records, of which those that were never written are a hole."""

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

from midus_hf.banks.reading_threads import ReadingThreads
from midus_hf.banks.record_read import DELETED, HALF_WRITTEN, UNWRITTEN, RecordRead, checksum_of, pieces
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
    """Records of equal size, each with a checksum.

    The file holds two tensors, `checksums [records]`, uint32, and `blocks [records, numel]`. A record that has no checksum has one of
    three marks in its place, four letters each: `none` if the record was never written, `gone` if it was deleted, and `half` while it
    is being written, so that a record that is half written is known by its mark. 0 is neither a checksum nor a mark: where the file
    system lost a page of checksums, or the file was copied with a hole there, the records of that page are refused.

    Args:
        path: Of the file.
        num_records: Expected.
        numel: Elements of a record, expected.
        writable: Whether records will be written. A file that has other names (hard links) is replaced by a copy first: what is
            written reaches none of these. Default: false.
        threads: That read and check large records, whose owner closes them. Default: some of its own.

    Raises:
        BankError: If the file is absent, is none of these, is cut short, or has other sizes.
    """

    def __init__(
        self, path: Path, num_records: int, numel: int, writable: bool = False, threads: ReadingThreads | None = None
    ):
        self.path, self.num_records, self.numel, self.writable = path, num_records, numel, writable
        self._threads, self._owns_threads = threads or ReadingThreads(), threads is None
        if writable:
            have_own_file(path)
        try:
            self._file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise BankError(
                f"bank file {path} cannot be opened ({error.strerror}); expected it beside the model."
            ) from None
        self._closing = weakref.finalize(self, os.close, self._file)  # a bank that nobody closed takes no file with it
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
        """Bytes of a record."""
        return self.numel * self.dtype.itemsize

    def checksums(self) -> numpy.ndarray:
        """Return the checksums of all records, or the marks in their places, `[records]`, uint32."""
        return numpy.frombuffer(os.pread(self._file, 4 * self.num_records, self._checksums_at), dtype="<u4")

    def checksum(self, index: int) -> int:
        """Return the checksum of one record, or the mark in its place; 0 where it was lost."""
        return struct.unpack("<I", os.pread(self._file, 4, self._checksums_at + 4 * index))[0]

    def written(self, without: Collection[int] = ()) -> list[int]:
        """Return the indices of the records that were written, ascending.

        Args:
            without: Indices that are left out, whatever there is of them. Default: none.

        Raises:
            BankError: If the checksum of a record was lost, or a record is half written.
        """
        checksums = self.checksums().copy()
        checksums[list(without)] = UNWRITTEN
        for index in numpy.isin(checksums, (0, HALF_WRITTEN)).nonzero()[0].tolist():
            self._check_mark(index, int(checksums[index]))
        return (~numpy.isin(checksums, (UNWRITTEN, DELETED))).nonzero()[0].tolist()

    def deleted(self) -> list[int]:
        """Return the indices of the records that were deleted and not written since, ascending."""
        return (self.checksums() == DELETED).nonzero()[0].tolist()

    def is_written(self, index: int) -> bool:
        """Whether a record was written, and not deleted since.

        Raises:
            BankError: If its checksum was lost, or it is half written.
        """
        checksum = self.checksum(index)
        self._check_mark(index, checksum)
        return checksum not in (UNWRITTEN, DELETED)

    def _check_mark(self, index: int, checksum: int) -> Any:
        """Raise what is wrong with a record that has neither a checksum nor the mark of one that was not written."""
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
        """Return a record `[numel]`; None if it was never written, or was deleted.

        Raises:
            BankError: If it is not what was written.
        """
        read = self.prepare(index)
        if read is None:
            return None
        return (read.begin(self._threads) if len(pieces(self.record_bytes)) > 1 else read).result()

    def prepare(self, index: int, mapped: bool = False) -> RecordRead | None:
        """Return what reads a record, now or by threads; None if the record was never written, or was deleted.

        Args:
            index: Of the record.
            mapped: Whether it may be the file itself, mapped, instead of a copy: it takes no memory of its own, and shows what
                others write there. Default: false.

        Raises:
            BankError: If the file ends within it. That its checksum was lost, or that it is half written, is raised by the result.
        """
        expected = self.checksum(index)
        if expected in (UNWRITTEN, DELETED):
            return None
        if expected in (0, HALF_WRITTEN):
            return RecordRead(expected, self.record_bytes, functools.partial(self._check_mark, index, expected))
        # What is written through this very object must not show in what was fetched before.
        record = self._mapped(index) if mapped and not self.writable else None
        record, is_there = (torch.empty(self.numel, dtype=self.dtype), False) if record is None else (record, True)
        data = _bytes_of(record)

        def work(start: int, end: int) -> int:
            if not is_there:
                self._read_at(index, start, data[start:end])
            return zlib.crc32(data[start:end])

        def fail() -> None:
            raise BankError(
                f"block {index} of bank file {self.path} is not what was written: its checksum differs. Copy the bank again, or "
                "delete the block."
            )

        return RecordRead(expected, self.record_bytes, record, work, fail)

    def _mapped(self, index: int) -> torch.Tensor | None:
        """A record as the file has it, which is read where it is touched; None where it lies across elements."""
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
        """Fill `data` from a place within a record."""
        place = self._blocks_at + index * self.record_bytes + start
        while data:
            try:
                count = os.preadv(self._file, [data], place)
            except OSError as error:
                raise BankError(
                    f"block {index} of bank file {self.path} cannot be read ({error.strerror}); expected an open file on a disk that "
                    "answers. Open the bank again."
                ) from error
            if not count:
                raise BankError(f"bank file {self.path} ends within block {index}. Copy the bank again.")
            data, place = data[count:], place + count

    def write(self, index: int, record: torch.Tensor) -> None:
        """Put a record `[numel]` in its place, cast to the dtype of the file."""
        assert record.shape == (self.numel,)
        data = _bytes_of(record.detach().to("cpu", self.dtype).contiguous())
        self._put_checksum(index, HALF_WRITTEN)
        self._write_at(self._blocks_at + index * self.record_bytes, data)
        self._put_checksum(index, self._checksum(data))

    def forget(self, index: int) -> None:
        """Delete a record: its bytes are overwritten with zeros, and it reads as one that was never written.

        The zeros are on the disk before the mark says that the record was deleted. Where a process or a machine ends in between,
        the record is either what it was or is refused when it is read, until it is deleted again. The room goes back to the disk
        where the file system can make holes.
        """
        if self.checksum(index) not in (UNWRITTEN, DELETED):
            start, zeros = self._blocks_at + index * self.record_bytes, bytes(min(self.record_bytes, _ZEROS_AT_ONCE))
            for place in range(0, self.record_bytes, _ZEROS_AT_ONCE):
                self._write_at(start + place, zeros[: self.record_bytes - place])
            self.sync()
            punch_hole(self._file, start, self.record_bytes)
            self.sync()
        self._put_checksum(index, DELETED)

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file, and end its threads if they are its own."""
        if self._owns_threads:
            self._threads.close()
        self._closing()
        self._file = -1  # its number may soon be that of another file

    def _checksum(self, data: memoryview) -> int:
        places = pieces(len(data))
        if len(places) == 1:
            return checksum_of([zlib.crc32(data)])
        sums = [self._threads.submit(lambda start, end: zlib.crc32(data[start:end]), *place) for place in places]
        return checksum_of([found.result() for found in sums])

    def _put_checksum(self, index: int, checksum: int) -> None:
        """Write the checksum of a record, or the mark in its place."""
        self._write_at(self._checksums_at + 4 * index, struct.pack("<I", checksum))

    def _write_at(self, place: int, data: bytes | memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], place + done)


class LevelCopy:
    """What a copy of a level holds, with blocks that are others than there: it is written, or linked where a file holds just that.

    Args:
        source: The level as it lies in the bank.
        trained: What returns the record `[numel]` of each block that is another than there, by index; it is cast to the dtype of
            the level.
        left_out: Indices of blocks that are deleted in the copy; they are not read.
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
        """Write the copy to a file, and force it to the disk.

        Args:
            path: Of the file; one that is there is overwritten.

        Raises:
            BankError: If a block of the level is not what was written.
        """
        source = self._source
        create_level_file(path, source.num_records, source.numel, source.dtype)
        with contextlib.closing(LevelFile(path, source.num_records, source.numel, writable=True)) as copy:
            for index in self._deleted:
                copy.forget(index)
            for index in (*self._kept, *self._trained):
                copy.write(index, self._record(index))
            copy.sync()

    def link(self, file: Path, path: Path) -> bool:
        """Give a file another name if it holds exactly this copy; return whether it has that name now.

        Args:
            file: Of a level; all of its records are read and compared. One that is damaged, or is no such file, is not linked.
            path: The other name, which nothing has.
        """
        try:
            if not self._is_in(file):
                return False
            os.link(os.path.realpath(file), path)
        except (BankError, OSError):  # a file system without links, or one that allows no more of them
            return False
        return True

    def _is_in(self, file: Path) -> bool:
        source = self._source
        with contextlib.closing(LevelFile(file, source.num_records, source.numel)) as other:
            return (
                other.dtype == source.dtype
                and other.deleted() == self._deleted
                and other.written() == sorted([*self._kept, *self._trained])
                # First what may have changed since that file was written.
                and all(_same_bytes(other.read(index), self._record(index)) for index in (*self._trained, *self._kept))
            )


def create_level_file(path: Path, num_records: int, numel: int, dtype: torch.dtype) -> None:
    """Make a file whose records were never written: it takes a page of the disk, and four bytes for each record."""
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
    """The memory of a contiguous record."""
    array: Any = record.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def _same_bytes(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))
