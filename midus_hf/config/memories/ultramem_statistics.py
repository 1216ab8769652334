"""What the cores of a Tucker-decomposed retrieval start as, and what the scores of the best slots then come to (UltraMemV2, B.2)."""

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

_CANDIDATES, _FEWEST, _MOST = 1 << 16, 4, 64
"""Candidates that are scored in all trials together, and bounds of these: means of many choices need few trials."""


@dataclass(frozen=True)
class UniformCores:
    """Square matrices `[..., r, r]`, uniform between 0 and 1, each divided by its largest singular value."""

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        import torch

        drawn = torch.empty(tensor.shape, dtype=torch.float32).uniform_(generator=generator)
        tensor.copy_(drawn / torch.linalg.matrix_norm(drawn, 2, keepdim=True))


class ScoreStatistics(NamedTuple):
    """Mean and variance of the scores of the k best slots, where scores of single keys are standard normal."""

    mean: float
    variance: float


MEASURED: dict[tuple[int, int, int, int, int], ScoreStatistics] = {}
"""What `best_scores` measured in this process, by its arguments."""


def best_scores(n: int, key_pairs: int, rank: int, side: int, k: int) -> ScoreStatistics:
    """Draw scores of keys and cores, retrieve as the memory does, and measure what was retrieved; the same at every call.

    Args:
        n: Keys of each set.
        key_pairs: h, sets of row keys, and of column keys.
        rank: r.
        side: Rows, and columns, that the first stage chooses.
        k: Slots that the second stage chooses.
    """
    sizes = (n, key_pairs, rank, side, k)
    if sizes not in MEASURED:
        MEASURED[sizes] = _measured(*sizes)
    return MEASURED[sizes]


def _measured(n: int, key_pairs: int, rank: int, side: int, k: int) -> ScoreStatistics:
    draw = random.Random(0)
    candidates = key_pairs**2 * side**2
    chosen: list[float] = []
    for _ in range(min(max(_FEWEST, _CANDIDATES // candidates), _MOST)):
        rows, columns = ([[_normals(draw, rank) for _ in range(n)] for _ in range(key_pairs)] for _ in range(2))
        scores: list[float] = []
        for of_rows in rows:
            for of_columns in columns:
                core, left, right = _core(draw, rank)
                best_rows = heapq.nlargest(side, of_rows, key=partial(_dot, left))
                best_columns = heapq.nlargest(side, of_columns, key=partial(_dot, right))
                mixed = [_times(row, core) for row in best_rows]
                scores += [_dot(row, column) for row in mixed for column in best_columns]
        chosen += heapq.nlargest(k, scores)
    mean = math.fsum(chosen) / len(chosen)
    return ScoreStatistics(mean, math.fsum((score - mean) ** 2 for score in chosen) / len(chosen))


def gain_of_norms(key_width: int, *first_choice: int) -> Constant:
    """Of queries and keys, by which the mean score of the best slots starts at one (appendix B.2).

    Args:
        key_width: D_k.
        first_choice: As `best_scores` takes.
    """
    return Constant((key_width * _score_scale(best_scores(*first_choice))) ** -0.25)


def values_of_scores(
    slots: int, width: int, pre_width: int, layers: int, inner: float, hidden: int, *first_choice: int
) -> Normal:
    """What values are drawn from where scores weigh them: arguments as `value_std` and `best_scores` take them."""
    scores = best_scores(*first_choice)
    mean_square = (scores.mean**2 + scores.variance) / _score_scale(scores) ** 2
    return Normal(value_std(mean_square, slots, width, pre_width, layers, inner, hidden))


def value_std(
    mean_square: float, slots: int, width: int, pre_width: int, layers: int, inner: float, hidden: int
) -> float:
    """sigma_V, by which the memory's output starts with the variance that the feed-forward network's has (equation 21).

    Without pre-values it follows from the same derivation.

    Args:
        mean_square: Of weights.
        slots: That a token reads.
        width: D_v.
        pre_width: D_p; 0 without pre-values.
        layers: Of the model.
        inner: Width of its feed-forward networks over `hidden`.
        hidden: Width of the model.
    """
    summed = slots * mean_square * width * layers
    if pre_width:
        return (0.2 * inner * hidden / (summed * pre_width)) ** 0.25
    return math.sqrt(0.08 * inner * hidden / summed)


def _score_scale(scores: ScoreStatistics) -> float:
    """What scores are divided by: their mean, unless so many slots are chosen that it is below their deviation."""
    return max(scores.mean, 1.0)


def _normals(draw: random.Random, count: int) -> list[float]:
    return [draw.gauss(0.0, 1.0) for _ in range(count)]


def _core(draw: random.Random, rank: int) -> tuple[list[list[float]], list[float], list[float]]:
    """A core as `UniformCore` draws it, and the singular vectors of its largest singular value, which is one."""
    core = [[draw.random() for _ in range(rank)] for _ in range(rank)]
    right = [1.0] * rank
    for _ in range(64):
        left = [_dot(row, right) for row in core]
        right = _unit(_times(left, core))
    left = [_dot(row, right) for row in core]
    largest = math.sqrt(_dot(left, left))
    return [[entry / largest for entry in row] for row in core], _unit(left), right


def _dot(left: list[float], right: list[float]) -> float:
    return sum(map(mul, left, right))


def _times(row: list[float], matrix: list[list[float]]) -> list[float]:
    return [_dot(row, list(column)) for column in zip(*matrix, strict=True)]


def _unit(vector: list[float]) -> list[float]:
    length = math.sqrt(_dot(vector, vector))
    return [entry / length for entry in vector]
