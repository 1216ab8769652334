"""A `.npy` file that grows by rows, and can be cut back to as many as are known to be whole."""

import os
from pathlib import Path

import numpy as np

from midus_hf.documents import first_line


class GrowingArray:
    """An array on disk that rows are appended to; `numpy.load` reads it, as a memory map too.

    Args:
        path: The file.
        dtype: Of its elements.
        width: c, for rows `[c]`. Default: None, rows are single numbers.
        rows: How many of its rows to keep; the file is made anew if it is 0. Default: 0.

    Raises:
        ValueError: If the file has fewer rows.
    """

    def __init__(self, path: Path, dtype: str, width: int | None = None, rows: int = 0):
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._inner = () if width is None else (width,)
        self._file = path.open("r+b" if rows else "w+b")
        self.rows = rows
        self._write_header()
        self._begin = self._file.tell()
        whole = self._begin + rows * self._dtype.itemsize * (width or 1)
        if self._file.seek(0, os.SEEK_END) < whole:
            self._file.close()
            raise ValueError(
                f"file {str(path)!r} has lost rows; expected {rows:,}. Delete its folder, and build again."
            )
        self._file.truncate(whole)
        self._file.seek(whole)

    def append(self, rows: np.ndarray) -> None:
        """Add rows behind the others.

        Args:
            rows: `[n, c]`, or `[n]` where rows are single numbers; converted to the file's type.
        """
        assert rows.shape[1:] == self._inner
        self._file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
        self.rows += len(rows)

    def flush(self) -> None:
        """Force what was appended to the disk; the file is whole until more is."""
        end = self._file.tell()
        self._write_header()
        assert self._file.tell() == self._begin, "numpy leaves room for a growing first axis"
        self._file.seek(end)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_header(self) -> None:
        self._file.seek(0)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.rows, *self._inner)}
        np.lib.format.write_array_header_1_0(self._file, header)


def map_array(path: Path, rows: int, remedy: str = "Delete its folder, and build again.") -> np.ndarray:
    """Map an array that has a row for each window.

    Args:
        path: A `.npy` file.
        rows: How many it must have.
        remedy: What is said to do about it. Default: to delete its folder.

    Raises:
        ValueError: If it is absent or not whole, or has another number of rows.
    """
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"file {str(path)!r} is absent or not whole: {first_line(error)}. {remedy}") from error
    if len(found) != rows:
        raise ValueError(
            f"file {str(path)!r} has {len(found):,} rows; expected {rows:,}, one for each window. {remedy}"
        )
    return found
