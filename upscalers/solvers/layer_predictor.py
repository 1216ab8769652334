"""A small network that predicts a layer's coordinates from those of the layers on both sides (LESA, section 3)."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from upscalers.solvers.shared_basis import RowFile


@dataclass(frozen=True)
class PredictorTraining:
    """How a predictor is trained.

    Args:
        hidden_size: Of both hidden layers.
        epochs: Passes over all rows.
        batch_size: Rows per step.
        learning_rate: Of AdamW.
        weight_decay: Of AdamW.
        norm_weight: lambda: weight of the norm loss; the mean squared error has 1 - lambda.
    """

    hidden_size: int
    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    norm_weight: float


class LayerPredictor(nn.Module):
    """Two hidden layers with ReLU: `[V_previous | V_next]` [rows, 2 in] to `V` [rows, in], each row on its own.

    Args:
        width: in.
        hidden_size: Of both hidden layers.
        generator: Draws the initial weights, as `nn.Linear` would.
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
        """[rows, 2 in] -> [rows, in]."""
        return self.layers(neighbours)


def num_steps(num_rows: int, num_layers: int, training: PredictorTraining) -> int:
    """Optimizer steps that `train_predictor` takes."""
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
    """Train on every row of every layer that has neighbours: the row of layers l - 1 and l + 1 predicts that of l.

    Args:
        rows: Coordinates of all layers.
        num_rows: r.
        num_layers: L, at least 3.
        width: in.
        training: How.
        generator: Draws initial weights and the order of rows.
        device: Where.
        done: Called after each step.
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
    """`(1 - lambda) MSE + lambda (|predicted|_F - |target|_F)^2` over a batch [rows, in].

    Without the second term predictions of rows that cannot be predicted shrink towards zero.
    """
    norm_error = (predicted.norm() - target.norm()).square()
    return (1 - norm_weight) * nn.functional.mse_loss(predicted, target) + norm_weight * norm_error


def predict(
    predictor: LayerPredictor, rows: RowFile, num_rows: int, width: int, previous: int, following: int, device: str
) -> torch.Tensor:
    """Coordinates [r, in] of a layer between two others; float32.

    Args:
        predictor: Trained.
        rows: Coordinates of all layers.
        num_rows: r.
        width: in.
        previous: The layer before.
        following: The layer after.
        device: Where.
    """
    predicted = torch.empty(num_rows, width, device=device)
    with torch.no_grad():
        for chunk in torch.arange(num_rows).split(1024):
            sides = [rows.read([(row, layer) for row in chunk.tolist()], 1)[:, 0] for layer in (previous, following)]
            predicted[chunk[0] : chunk[-1] + 1] = predictor(torch.cat(sides, dim=1).to(device))
    return predicted
