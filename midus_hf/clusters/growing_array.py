"""A `.npy` file that grows by rows, and can be cut back to the rows that are known to be complete."""

import os
from pathlib import Path

import numpy as np

from midus_hf.documents import first_line


class GrowingArray:
    """Array on disk to which rows are appended. `numpy.load` can read or memory-map the file.

    Args:
        dtype: Dtype of the elements.
        width: Width c of rows `[c]`. Default: None; rows are single numbers.
        rows: Number of existing rows to keep; 0 creates the file anew. Default: 0.

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
        whole_bytes = self._begin + rows * self._dtype.itemsize * (width or 1)
        if self._file.seek(0, os.SEEK_END) < whole_bytes:
            self._file.close()
            raise ValueError(
                f"file {str(path)!r} has lost rows; expected {rows:,}. Delete its folder, and build again."
            )
        self._file.truncate(whole_bytes)
        self._file.seek(whole_bytes)

    def append(self, rows: np.ndarray) -> None:
        """Append rows.

        Args:
            rows: Rows `[n, c]`, or `[n]` if rows are single numbers; converted to the dtype of the file.
        """
        assert rows.shape[1:] == self._inner
        self._file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
        self.rows += len(rows)

    def flush(self) -> None:
        """Write the row count and flush all rows to the disk. The file is valid until more rows are appended."""
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
    """Open an array that has a row per window, memory-mapped.

    Args:
        path: A `.npy` file.
        rows: Number of rows that the array must have.
        remedy: Last sentence of error messages. Default: advice to delete the folder and to build again.

    Raises:
        ValueError: If the file is missing or incomplete, or has another number of rows.
    """
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"file {str(path)!r} is absent or not whole: {first_line(error)}. {remedy}") from error
    if len(array) != rows:
        raise ValueError(
            f"file {str(path)!r} has {len(array):,} rows; expected {rows:,}, one for each window. {remedy}"
        )
    return array
