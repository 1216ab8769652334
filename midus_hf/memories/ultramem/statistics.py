"""Initialisation of a Tucker-decomposed retrieval (UltraMemV2, appendix B.2): cores, and gains and values that suit their scores."""

import heapq
import math
import random
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from midus_hf.config.declared_tensors import Constant, Normal

if TYPE_CHECKING:
    import torch

# Candidates to score in all trials together, and the bounds of the number of trials: a mean of many candidates needs
# few trials.
_CANDIDATES, _FEWEST, _MOST = 1 << 16, 4, 64


@dataclass(frozen=True)
class UniformCores:
    """Square matrices `[..., r, r]`, uniform between 0 and 1, each divided by its largest singular value."""

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        import torch

        drawn = torch.empty(tensor.shape, dtype=torch.float32).uniform_(generator=generator)
        tensor.copy_(drawn / torch.linalg.matrix_norm(drawn, 2, keepdim=True))


class ScoreStatistics(NamedTuple):
    """Mean and variance of the scores of the k best slots, if scores of single keys are standard normal."""

    mean: float
    variance: float


# Results of `best_scores` in this process, by its arguments.
MEASURED: dict[tuple[int, int, int, int], ScoreStatistics] = {}


def best_scores(n: int, rank: int, side: int, k: int) -> ScoreStatistics:
    """Measure the scores of the k best slots: draw scores and cores, the same at every call, and retrieve as the memory does.

    Args:
        n: Number of row keys, and of column keys.
        rank: r, the rank of the cores.
        side: Number of rows, and of columns, that the first stage chooses.
        k: Number of slots that the second stage chooses.
    """
    sizes = (n, rank, side, k)
    if sizes not in MEASURED:
        MEASURED[sizes] = _measured(*sizes)
    return MEASURED[sizes]


def _measured(n: int, rank: int, side: int, k: int) -> ScoreStatistics:
    draw = random.Random(0)
    chosen: list[float] = []
    for _ in range(min(max(_FEWEST, _CANDIDATES // side**2), _MOST)):
        rows, columns = ([[draw.gauss(0.0, 1.0) for _ in range(rank)] for _ in range(n)] for _ in range(2))
        core, left, right = _core(draw, rank)
        best_rows = heapq.nlargest(side, rows, key=partial(_dot, left))
        best_columns = heapq.nlargest(side, columns, key=partial(_dot, right))
        mixed = [_times(row, core) for row in best_rows]
        chosen += heapq.nlargest(k, (_dot(row, column) for row in mixed for column in best_columns))
    mean = math.fsum(chosen) / len(chosen)
    return ScoreStatistics(mean, math.fsum((score - mean) ** 2 for score in chosen) / len(chosen))


def gain_of_norms(key_width: int, *first_choice: int) -> Constant:
    """Return the gain of the norms of queries and keys with which the best slots' mean score starts at one (appendix B.2).

    Args:
        key_width: D_k, the width of keys.
        first_choice: Arguments of `best_scores`.
    """
    return Constant((key_width * _score_scale(best_scores(*first_choice))) ** -0.25)


def values_of_scores(
    slots: int, width: int, pre_width: int, layers: int, inner: float, hidden: int, *first_choice: int
) -> Normal:
    """Return the distribution of values with which the output starts with the variance of the feed-forward network's (equation 21).

    The formula without pre-values follows from the same derivation.

    Args:
        slots: Number of slots that a token reads.
        width: D_v, the width of values.
        pre_width: D_p, the width of pre-values; 0 without pre-values.
        layers: Number of layers of the model.
        inner: Width of the feed-forward networks divided by `hidden`.
        hidden: Width of the model.
        first_choice: Arguments of `best_scores`.
    """
    scores = best_scores(*first_choice)
    mean_square = (scores.mean**2 + scores.variance) / _score_scale(scores) ** 2
    summed = slots * mean_square * width * layers
    if pre_width:
        return Normal((0.2 * inner * hidden / (summed * pre_width)) ** 0.25)
    return Normal(math.sqrt(0.08 * inner * hidden / summed))


def _score_scale(scores: ScoreStatistics) -> float:
    """Return the divisor of scores: their mean, or 1 if so many slots are chosen that the mean is below 1."""
    return max(scores.mean, 1.0)


def _core(draw: random.Random, rank: int) -> tuple[list[list[float]], list[float], list[float]]:
    """Draw a core as `UniformCores` does; return the core and the singular vectors of its largest singular value, which is 1."""
    core = [[draw.random() for _ in range(rank)] for _ in range(rank)]
    right = [1.0] * rank
    for _ in range(64):
        left = [_dot(row, right) for row in core]
        right = _of_unit_length(_times(left, core))
    left = [_dot(row, right) for row in core]
    largest = math.sqrt(_dot(left, left))
    return [[entry / largest for entry in row] for row in core], _of_unit_length(left), right


def _dot(left: list[float], right: list[float]) -> float:
    return sum(map(mul, left, right))


def _times(row: list[float], matrix: list[list[float]]) -> list[float]:
    return [_dot(row, list(column)) for column in zip(*matrix, strict=True)]


def _of_unit_length(vector: list[float]) -> list[float]:
    length = math.sqrt(_dot(vector, vector))
    return [entry / length for entry in vector]
