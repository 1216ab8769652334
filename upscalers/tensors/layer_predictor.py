"""Prediction of a layer's coordinates from its neighbours' (LESA, section 3), in a shared basis."""

import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from upscalers.checkpoint.safetensors_format import write_all

# As a share of the largest: dividing by smaller singular values would amplify noise.
SINGULAR_GUARD = 1e-6


@dataclass(frozen=True)
class SharedBasis:
    """U [out, r] and descending S [r], float64, of `[W_0 | W_1 | ...] = U diag(S) V^T`, each W [out, in]."""

    vectors: torch.Tensor
    values: torch.Tensor
    num_left_out: int

    def coordinates(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the coordinates `V_l = diag(1 / S) U^T W_l` [r, in], float64, of a matrix [out, in]."""
        return (self.vectors.mT @ matrix) / self.values[:, None]

    def matrix(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Return the matrix `U diag(S) V` [out, in] of coordinates V [r, in], in their dtype."""
        return (self.vectors * self.values).to(coordinates.dtype) @ coordinates


def shared_basis(num_layers: int, matrix_of: Callable[[int], torch.Tensor], done: Callable[[], None]) -> SharedBasis:
    """Compute a shared basis from the Gram matrix `sum_l W_l W_l^T` [out, out], reading layer by layer."""
    gram = None
    width = 0
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
    values = values[:kept].clone()
    vectors = vectors[:, :kept]
    if kept:
        largest = vectors.abs().argmax(dim=0, keepdim=True)
        vectors = vectors * vectors.gather(0, largest).sign()
    done()
    return SharedBasis(vectors, values, num_left_out)


class RowFile:
    """Temporary file with the coordinates [r, L, in] of all layers, float32; the context removes it."""

    def __init__(self, path: Path, num_rows: int, num_layers: int, width: int):
        self.num_rows = num_rows
        self.num_layers = num_layers
        self.width = width
        self._path = path
        self._file = path.open("w+b", buffering=0)

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def write_layer(self, layer: int, rows: torch.Tensor) -> None:
        data = rows.to("cpu", torch.float32).contiguous().numpy()
        for row in range(self.num_rows):
            write_all(self._file.fileno(), data[row].data.cast("B"), self._offset(row, layer))

    def read(self, places: Sequence[tuple[int, int]], num_layers: int) -> torch.Tensor:
        """Read pieces [len(places), num_layers, in] of consecutive layers, by row and first layer."""
        pieces = numpy.empty((len(places), num_layers, self.width), dtype=numpy.float32)
        for piece, (row, layer) in zip(pieces, places, strict=True):
            if os.preadv(self._file.fileno(), [piece.data], self._offset(row, layer)) < piece.nbytes:
                raise OSError("a temporary file ended early")
        return torch.from_numpy(pieces)

    def _offset(self, row: int, layer: int) -> int:
        return 4 * self.width * (row * self.num_layers + layer)


def new_predictor(width: int, hidden_size: int, generator: torch.Generator) -> nn.Sequential:
    """Return a network from rows of `[V_previous | V_next]` [rows, 2 in] to rows of `V` [rows, in]."""
    sizes = [2 * width, hidden_size, hidden_size, width]
    with torch.device("meta"):
        linears = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]
    predictor = nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2]).to_empty(device="cpu")
    for linear in linears:
        bound = 1 / math.sqrt(linear.in_features)
        nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5), generator=generator)
        nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
    return predictor


def train_predictor(
    rows: RowFile, generator: torch.Generator, options: Any, done: Callable[[], None]
) -> nn.Sequential:
    """Train a predictor of each row of each inner layer from both neighbours' rows, with AdamW."""
    predictor = new_predictor(rows.width, options.hidden_size, generator).to(options.device)
    rates = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
    optimizer = torch.optim.AdamW(predictor.parameters(), **rates, fused=True)
    inner_layers = rows.num_layers - 2
    for _ in range(options.epochs):
        order = torch.randperm(rows.num_rows * inner_layers, generator=generator)
        for batch in order.split(options.batch_size):
            places = [(sample // inner_layers, sample % inner_layers) for sample in batch.tolist()]
            previous, target, following = rows.read(places, 3).to(options.device).unbind(dim=1)
            predicted = predictor(torch.cat([previous, following], dim=1))
            loss = predictor_loss(predicted, target, options.norm_weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done()
    return predictor


def predictor_loss(predicted: torch.Tensor, target: torch.Tensor, norm_weight: float) -> torch.Tensor:
    """Return `(1 - lambda) MSE + lambda (|predicted|_F - |target|_F)^2` over a batch [rows, in]."""
    norm_error = (predicted.norm() - target.norm()).square()
    return (1 - norm_weight) * nn.functional.mse_loss(predicted, target) + norm_weight * norm_error


def predict(predictor: nn.Module, rows: RowFile, previous: int, following: int, device: str) -> torch.Tensor:
    """Return the predicted coordinates [r, in], float32, of a layer between `previous` and `following`."""
    predicted = torch.empty(rows.num_rows, rows.width, device=device)
    with torch.no_grad():
        for chunk in torch.arange(rows.num_rows).split(1024):
            sides = [rows.read([(row, layer) for row in chunk.tolist()], 1)[:, 0] for layer in (previous, following)]
            predicted[chunk[0] : chunk[-1] + 1] = predictor(torch.cat(sides, dim=1).to(device))
    return predicted
