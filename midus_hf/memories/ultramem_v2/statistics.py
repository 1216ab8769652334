"""Initialisation of a Tucker-decomposed retrieval (UltraMemV2, appendix B.2): cores, and gains and values that suit their scores."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from midus_hf.config.declared_tensors import Constant, Normal

if TYPE_CHECKING:
    import torch

# Candidates to score in all trials together, and the bounds of the number of trials: a mean of many candidates needs
# few trials.
_CANDIDATES, _FEWEST, _MOST = 1 << 20, 4, 512


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
    import torch

    trials = min(max(_FEWEST, _CANDIDATES // side**2), _MOST)
    draw: Any = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64, "device": "cpu"}
    rows, columns = torch.randn(2, trials, n, rank, **draw)
    # Cores are positive, so their leading singular vectors are too, up to their common sign.
    left, values, right = torch.linalg.svd(torch.rand(trials, rank, rank, **draw))
    core = (left * (values / values[:, :1])[:, None]) @ right
    best_rows, best_columns = (
        states.gather(1, (states @ vector.abs()[..., None]).topk(side, dim=1).indices.expand(-1, -1, rank))
        for states, vector in ((rows, left[..., 0]), (columns, right[:, 0]))
    )  # [trials, side, rank] each
    chosen = (best_rows @ core @ best_columns.mT).flatten(1).topk(k).values
    return ScoreStatistics(chosen.mean().item(), chosen.var(correction=0).item())


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
