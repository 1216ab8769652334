"""The blocks of one level of a bank in a safetensors file, which is mapped: a block is a row, and an unwritten row is a hole."""

import contextlib
import json
import os
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

from midus_hf.files.whole_files import have_own_file, punch_hole

# Marks of rows. No mark is 0, since a file system that is damaged leaves pages of zeros.
UNWRITTEN, WRITTEN, HALF_WRITTEN, DELETED = 1, 2, 3, 4

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
_PAGE = 4096
_BYTES_AT_ONCE = 2**22


class BankError(ValueError):
    """A bank that cannot be read, or does not belong to its model."""


class MappedLevel:
    """The rows of a level's file, mapped into memory: what is read is cached, and shared by processes, as pages of the file.

    The file holds two tensors: `blocks [rows, numel]`, and `marks [rows]`, uint8, which says of each row whether it was
    written, deleted, or is half written. Row 0 is the block of the generic memory, and row i + 1 the block of node i.

    Args:
        rows: Expected number of rows; a file may have more if a tree had grown and the bank's description did not say yet.
        numel: Expected number of elements per row.

    Raises:
        BankError: If the file is missing, truncated, not a bank's file, or of other sizes.
    """

    def __init__(self, path: Path, rows: int, numel: int):
        self.path = path
        if not path.is_file():
            raise BankError(f"bank file {path} is absent; expected it beside the model. Copy the bank again.")
        try:
            with safetensors.safe_open(path, "pt") as file:
                self.blocks, self.marks = file.get_tensor("blocks"), file.get_tensor("marks")
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise BankError(
                f"bank file {path} cannot be read ({error}); expected a whole file of a bank. Copy the bank again."
            ) from None
        if self.blocks.dim() != 2 or self.blocks.shape[1] != numel or not rows <= len(self.blocks) == len(self.marks):
            raise BankError(
                f"bank file {path} has blocks of shape {list(self.blocks.shape)}; expected {[rows, numel]}. It belongs to "
                "another model."
            )

    def row(self, row: int) -> torch.Tensor | None:
        """Return a row, `[numel]`, mapped from the file; None if it was never written or was deleted.

        Raises:
            BankError: If the row's mark was lost, or the row is half written.
        """
        mark = int(self.marks[row])
        if mark == WRITTEN:
            return self.blocks[row]
        if mark in (UNWRITTEN, DELETED):
            return None
        damage = "half written: a process ended while it wrote it" if mark == HALF_WRITTEN else "without its mark"
        name = f"block {row - 1}" if row else "the generic block"
        raise BankError(f"{name} of bank file {self.path} is {damage}. Copy the bank again, or delete the block.")

    def rows(self, mark: int) -> list[int]:
        """Return the rows with a mark, ascending."""
        return (self.marks == mark).nonzero().flatten().tolist()


class WritableLevel:
    """The rows of a level's file, to be written in place.

    If the file has other names (hard links), it is first replaced by a copy, so that writes do not reach the other names.
    """

    def __init__(self, path: Path, rows: int, numel: int, dtype: torch.dtype):
        self._row_bytes, self._dtype = numel * dtype.itemsize, dtype
        have_own_file(path)
        self._file = os.open(path, os.O_RDWR)
        (header,) = struct.unpack("<Q", os.pread(self._file, 8, 0))
        self._blocks_at = 8 + header
        self._marks_at = self._blocks_at + rows * self._row_bytes

    def write(self, records: Mapping[int, Callable[[], torch.Tensor]]) -> None:
        """Write rows, which functions return, `[numel]`, cast to the dtype of the file.

        The mark that a row is half written reaches the disk before the row does, and the row before the mark that it is
        written. A row that a kill or a crash left half written is therefore noticed.
        """
        self._mark(records, HALF_WRITTEN)
        for row, record in records.items():
            self._write_at(self._blocks_at + row * self._row_bytes, record())
        self.sync()
        self._mark(records, WRITTEN)

    def delete(self, rows: Collection[int]) -> None:
        """Delete rows: overwrite their bytes with zeros, force these to the disk, and free the room where a file can have holes.

        If the process or the machine stops before all is done, the row is refused until it is deleted again.
        """
        self._mark(rows, HALF_WRITTEN)
        zeros = torch.zeros(min(self._row_bytes, _BYTES_AT_ONCE), dtype=torch.uint8)
        for row in rows:
            start = self._blocks_at + row * self._row_bytes
            for offset in range(0, self._row_bytes, _BYTES_AT_ONCE):
                self._write_at(start + offset, zeros[: self._row_bytes - offset])
        self.sync()
        for row in rows:
            punch_hole(self._file, self._blocks_at + row * self._row_bytes, self._row_bytes)
        self._mark(rows, DELETED)

    def _mark(self, rows: Collection[int] | Mapping[int, Any], mark: int) -> None:
        for row in rows:
            self._write_at(self._marks_at + row, torch.tensor([mark], dtype=torch.uint8))
        self.sync()

    def sync(self) -> None:
        """Flush all writes to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write_at(self, position: int, tensor: torch.Tensor) -> None:
        if tensor.dtype != torch.uint8:
            tensor = tensor.detach().to("cpu", self._dtype).contiguous().view(torch.uint8)
        data = tensor.numpy().data
        while data:
            count = os.pwrite(self._file, data, position)
            data, position = data[count:], position + count


def create_level_file(path: Path, rows: int, numel: int, dtype: torch.dtype) -> None:
    """Create a file of unwritten rows. The file takes one page of disk space and one byte per row."""
    end = rows * numel * dtype.itemsize
    header = {
        "blocks": {"dtype": _DTYPES[dtype], "shape": [rows, numel], "data_offsets": [0, end]},
        "marks": {"dtype": "U8", "shape": [rows], "data_offsets": [end, end + rows]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(end, os.SEEK_CUR)
        for start in range(0, rows, _BYTES_AT_ONCE):
            file.write(bytes([UNWRITTEN]) * min(_BYTES_AT_ONCE, rows - start))


def copy_level(
    source: MappedLevel,
    path: Path,
    rows: int,
    changed: Mapping[int, Callable[[], torch.Tensor]],
    deleted: Collection[int],
) -> None:
    """Write a copy of a level over a file, and flush it to the disk.

    Args:
        source: The level that is copied.
        rows: Rows of the copy, as many as the source has or more.
        changed: For each row that is replaced, a function that returns the new row, `[numel]`.
        deleted: Rows that are marked as deleted in the copy, and not read.

    Raises:
        BankError: If a row that is copied is half written or has lost its mark.
    """
    numel, dtype = source.blocks.shape[1], source.blocks.dtype
    suspect = (source.marks != UNWRITTEN).nonzero().flatten().tolist()
    kept = {
        row: record
        for row in suspect
        if row not in changed and row not in deleted and (record := source.row(row)) is not None
    }
    gone = {*deleted, *source.rows(DELETED)} - changed.keys()
    create_level_file(path, rows, numel, dtype)
    with contextlib.closing(WritableLevel(path, rows, numel, dtype)) as copy:
        copy.delete(sorted(gone))
        copy.write({**{row: record.detach for row, record in kept.items()}, **changed})
