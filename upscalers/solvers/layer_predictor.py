"""A small network that predicts a layer's coordinates from the coordinates of the layers on both sides (LESA, section 3)."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from upscalers.solvers.shared_basis import RowFile


@dataclass(frozen=True)
class PredictorTraining:
    """Settings for training a predictor.

    Args:
        hidden_size: Width of both hidden layers.
        epochs: Number of passes over all rows.
        batch_size: Number of rows per step.
        learning_rate: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        norm_weight: lambda, the weight of the norm loss; the weight of the mean squared error is 1 - lambda.
    """

    hidden_size: int
    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    norm_weight: float


class LayerPredictor(nn.Module):
    """Network with two hidden layers and ReLU that maps rows of `[V_previous | V_next]` [rows, 2 in] to rows of `V` [rows, in].

    Args:
        width: in, the width of a row of `V`.
        hidden_size: Width of both hidden layers.
        generator: Random generator of the initial weights, which are distributed as in `nn.Linear`.
    """

    def __init__(self, width: int, hidden_size: int, generator: torch.Generator):
        super().__init__()
        sizes = [2 * width, hidden_size, hidden_size, width]
        with torch.device("meta"):
            linears = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]
        self.layers = nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2]).to_empty(device="cpu")
        for linear in linears:
            bound = 1 / math.sqrt(linear.in_features)
            nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5), generator=generator)
            nn.init.uniform_(linear.bias, -bound, bound, generator=generator)

    def forward(self, neighbours: torch.Tensor) -> torch.Tensor:
        """Map rows of both neighbours [rows, 2 in] to rows of the layer between them [rows, in]."""
        return self.layers(neighbours)


def num_steps(num_rows: int, num_layers: int, training: PredictorTraining) -> int:
    """Return the number of optimizer steps that `train_predictor` takes."""
    return training.epochs * math.ceil(num_rows * (num_layers - 2) / training.batch_size)


def train_predictor(
    rows: RowFile,
    num_rows: int,
    num_layers: int,
    width: int,
    training: PredictorTraining,
    generator: torch.Generator,
    device: str,
    done: Callable[[], None] = lambda: None,
) -> LayerPredictor:
    """Train a predictor on every row of every inner layer l, which the rows of layers l - 1 and l + 1 predict.

    Args:
        rows: File with the coordinates of all layers.
        num_rows: r, rows per layer.
        num_layers: L, number of layers, at least 3.
        width: in, the width of a row.
        training: Settings of the training.
        generator: Random generator for the initial weights and the order of rows.
        device: Name of the device in torch.
        done: Function called after each step. Default: does nothing.
    """
    predictor = LayerPredictor(width, training.hidden_size, generator).to(device)
    optimizer = torch.optim.AdamW(
        predictor.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay, fused=True
    )
    inner_layers = num_layers - 2
    for _ in range(training.epochs):
        order = torch.randperm(num_rows * inner_layers, generator=generator)
        for batch in order.split(training.batch_size):
            places = [(sample // inner_layers, sample % inner_layers) for sample in batch.tolist()]
            previous, target, following = rows.read(places, 3).to(device).unbind(dim=1)
            predicted = predictor(torch.cat([previous, following], dim=1))
            loss = predictor_loss(predicted, target, training.norm_weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done()
    return predictor


def predictor_loss(predicted: torch.Tensor, target: torch.Tensor, norm_weight: float) -> torch.Tensor:
    """Return `(1 - lambda) MSE + lambda (|predicted|_F - |target|_F)^2` over a batch [rows, in].

    Without the second term, predictions of rows that cannot be predicted would shrink towards zero.
    """
    norm_error = (predicted.norm() - target.norm()).square()
    return (1 - norm_weight) * nn.functional.mse_loss(predicted, target) + norm_weight * norm_error


def predict(
    predictor: LayerPredictor, rows: RowFile, num_rows: int, width: int, previous: int, following: int, device: str
) -> torch.Tensor:
    """Return the predicted coordinates [r, in], float32, of a layer between two others.

    Args:
        predictor: A trained predictor.
        rows: File with the coordinates of all layers.
        num_rows: r, rows per layer.
        width: in, the width of a row.
        previous: Index of the layer before.
        following: Index of the layer after.
        device: Name of the device in torch.
    """
    predicted = torch.empty(num_rows, width, device=device)
    with torch.no_grad():
        for chunk in torch.arange(num_rows).split(1024):
            sides = [rows.read([(row, layer) for row in chunk.tolist()], 1)[:, 0] for layer in (previous, following)]
            predicted[chunk[0] : chunk[-1] + 1] = predictor(torch.cat(sides, dim=1).to(device))
    return predicted
