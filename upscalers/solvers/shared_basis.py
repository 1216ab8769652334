"""A basis shared by the same matrix of all layers: singular vectors of the joined matrices, computed without joining them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy
import torch

# Smallest singular value that is kept, as a share of the largest: dividing by a smaller one would amplify noise.
SINGULAR_GUARD = 1e-6


@dataclass(frozen=True)
class SharedBasis:
    """The economy singular value decomposition `[W_0 | W_1 | ...] = U diag(S) V^T` of L matrices [out, in].

    Layer l is `W_l = U diag(S) V_l`, where `V_l` [r, in] is the layer's part of `V^T` (LESA, section 3).

    Args:
        vectors: U [out, r], float64.
        values: S [r], descending, float64.
        num_left_out: Number of directions left out because their singular value is below `SINGULAR_GUARD`.
    """

    vectors: torch.Tensor
    values: torch.Tensor
    num_left_out: int

    def coordinates(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the coordinates `V_l = diag(1 / S) U^T W_l` [r, in], float64, of a matrix [out, in]."""
        return (self.vectors.mT @ matrix) / self.values[:, None]

    def matrix(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Return the matrix `U diag(S) V` [out, in] of coordinates V [r, in], in the dtype of the coordinates."""
        return (self.vectors * self.values).to(coordinates.dtype) @ coordinates


def shared_basis(
    num_layers: int, matrix_of: Callable[[int], torch.Tensor], done: Callable[[], None] = lambda: None
) -> SharedBasis:
    """Compute a shared basis from the Gram matrix `sum_l W_l W_l^T` [out, out], with one layer in memory at a time.

    Signs of singular vectors are arbitrary and differ between libraries, so here the largest entry of each vector, by
    absolute value, is made positive.

    Args:
        num_layers: L, number of layers.
        matrix_of: Function that returns W_l [out, in], float64, for a layer index l.
        done: Function called after each layer, and after the decomposition. Default: does nothing.
    """
    gram, width = None, 0
    for layer in range(num_layers):
        matrix = matrix_of(layer)
        width += matrix.shape[1]
        gram = matrix @ matrix.mT if gram is None else gram.addmm_(matrix, matrix.mT)
        done()
    assert gram is not None
    eigenvalues, vectors = torch.linalg.eigh(gram)
    del gram
    values = eigenvalues.clamp_min(0).sqrt().flip(0)
    vectors = vectors.flip(1)
    kept = int((values > SINGULAR_GUARD * values[0]).sum())
    num_left_out = min(len(values), width) - kept
    values, vectors = values[:kept].clone(), vectors[:, :kept]
    if kept:
        largest = vectors.abs().argmax(dim=0, keepdim=True)
        vectors = vectors * vectors.gather(0, largest).sign()
    done()
    return SharedBasis(vectors, values, num_left_out)


class RowFile:
    """File with the coordinates of all layers, from which any rows are read without holding the other rows in memory.

    The file is [r, L, in], float32, so that one row of consecutive layers lies in one piece.

    Args:
        path: Path of the file. Leaving the context removes the file.
        num_rows: r, rows per layer.
        num_layers: L, number of layers.
        width: in, the width of a row.
    """

    def __init__(self, path: Path, num_rows: int, num_layers: int, width: int):
        self._path = path
        self._num_rows, self._num_layers, self._width = num_rows, num_layers, width
        self._row_bytes = 4 * width
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def write_layer(self, layer: int, rows: torch.Tensor) -> None:
        """Store the rows [r, in] of a layer."""
        data = rows.to("cpu", torch.float32).contiguous().numpy()
        for index in range(self._num_rows):
            _write(self._file, data[index].data.cast("B"), self._offset(index, layer))

    def read(self, places: Sequence[tuple[int, int]], num_layers: int) -> torch.Tensor:
        """Read pieces [len(places), num_layers, in], float32.

        Args:
            places: Row and first layer of each piece.
            num_layers: Number of consecutive layers in each piece.
        """
        data = numpy.empty((len(places), num_layers, self._width), dtype=numpy.float32)
        for piece, (row, layer) in zip(data, places, strict=True):
            _read(self._file, piece.reshape(-1).data.cast("B"), self._offset(row, layer))
        return torch.from_numpy(data)

    def _offset(self, row: int, layer: int) -> int:
        return (row * self._num_layers + layer) * self._row_bytes


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _read(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(file, [data], offset)
        if not count:
            raise OSError("a temporary file ended early")
        data, offset = data[count:], offset + count
