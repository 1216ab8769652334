"""The blocks of one level of a bank in a safetensors file, which is mapped: a block is a row, and an unwritten row is a hole."""

import json
import math
import mmap
import struct
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

from midus_hf.config.errors import RequestError
from midus_hf.files.outputs import atomic_write

# Row 0 is the block of the generic memory, and row i + 1 that of node i.
# Marks of rows. No mark is 0, since a file system that is damaged leaves pages of zeros.
UNWRITTEN, WRITTEN, DELETED = 1, 2, 3

SAFETENSORS_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_PAGE = 4096


class MappedLevel:
    """The rows of a level's file, mapped into memory: pages that are read are cached, and shared by processes."""

    def __init__(self, path: Path, rows: int, numel: int):
        self.path = path
        try:
            with safetensors.safe_open(path, "np") as file:
                blocks, self.marks = file.get_slice("blocks"), torch.from_numpy(file.get_tensor("marks"))
                shape, dtype = blocks.get_shape(), _DTYPES[blocks.get_dtype()]
            self.blocks = _mapped(path, math.prod(shape), dtype, behind=len(self.marks)).view(shape)
        except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
            raise RequestError(
                f"bank file {path} cannot be read ({error}); expected a whole file of a bank. Copy the bank again."
            ) from None
        # A save that was killed may have left more rows than the description has.
        if self.blocks.dim() != 2 or self.blocks.shape[1] != numel or not rows <= len(self.blocks) == len(self.marks):
            raise RequestError(
                f"bank file {path} has blocks of shape {list(self.blocks.shape)}; expected {[rows, numel]}. It belongs to "
                "another model."
            )

    def row(self, row: int) -> torch.Tensor | None:
        """Return a row, `[numel]`, mapped from the file; None if it was never written or was deleted."""
        mark = int(self.marks[row]) if row < len(self.marks) else UNWRITTEN
        if mark not in (UNWRITTEN, WRITTEN, DELETED):
            block = f"block {row - 1}" if row else "the generic block"
            raise RequestError(
                f"{block} of bank file {self.path} is without its mark. Copy the bank again, or delete the block."
            )
        return self.blocks[row] if mark == WRITTEN else None

    def marked(self) -> list[int]:
        """Return the rows that were written or deleted, or whose mark was lost, ascending."""
        return (self.marks != UNWRITTEN).nonzero().flatten().tolist()

    def rows(self, mark: int) -> list[int]:
        """Return the rows with a mark, ascending."""
        return (self.marks == mark).nonzero().flatten().tolist()


def _mapped(path: Path, count: int, dtype: torch.dtype, behind: int) -> torch.Tensor:
    """Return the numbers of a file that are followed by `behind` bytes, mapped for reading alone."""
    # Safetensors maps for torch what could be written too, which Linux refuses for a file larger than the machine's memory.
    start = path.stat().st_size - behind - count * dtype.itemsize
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what cannot be written
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start)


def file_head(tensors: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return the bytes before the tensors in a safetensors file: whole pages, so that the tensors begin at a page."""
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return struct.pack("<Q", len(text)) + text


def write_level(
    path: Path,
    rows: int,
    numel: int,
    dtype: torch.dtype,
    records: Mapping[int, Callable[[], torch.Tensor]],
    deleted: Collection[int] = (),
) -> None:
    """Write the file of a level atomically. Rows that are not written are holes: zeros that take no space."""
    row_bytes, end = numel * dtype.itemsize, rows * numel * dtype.itemsize
    header = {
        "blocks": {"dtype": SAFETENSORS_DTYPES[dtype], "shape": [rows, numel], "data_offsets": [0, end]},
        "marks": {"dtype": "U8", "shape": [rows], "data_offsets": [end, end + rows]},
    }
    head = file_head(header)
    marks = bytearray([UNWRITTEN]) * rows
    with atomic_write(path) as partial, partial.open("wb") as file:
        file.write(head)
        for row, record in sorted(records.items()):
            file.seek(len(head) + row * row_bytes)
            file.write(record().detach().to("cpu", dtype).contiguous().view(torch.uint8).numpy().data)
            marks[row] = WRITTEN
        for row in deleted:
            marks[row] = DELETED
        file.seek(len(head) + end)
        file.write(marks)
