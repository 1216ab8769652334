"""Arguments and results that all bodies of attention to the depth share."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class DepthInputs(NamedTuple):
    """Queries and the slots that they read. All tensors share a dtype.

    Args:
        query: `[B, H, T, d]`.
        keys: Key of each of n slots, `[B, K, T, d]`; n is 1 or more, and K divides H.
        values: Value of each slot, `[B, K, T, d]`.
        scaling: Factor of scores.
        softcap: Bound c of scores in `c * tanh(score / c)`; None for no bound.
    """

    query: torch.Tensor
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    scaling: float
    softcap: float | None


class DepthReading(NamedTuple):
    """Result of attention to the depth, or the gradient of this result.

    Args:
        output: `[B, H, T, d]`.
        lse: Logarithm of the sum of the exponentials of scores, `[B, H, T]`.
    """

    output: torch.Tensor
    lse: torch.Tensor


class Wanted(NamedTuple):
    """Choice of the gradients to compute.

    Args:
        query: Whether the gradient of the query is wanted. Default: true.
        slots: Whether the gradients of keys and values are wanted. Default: true.
    """

    query: bool = True
    slots: bool = True


def new_by_token(heads: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor `[B, H, T, d]` that is laid out in memory as `[B, T, H, d]`, as kernels write."""
    return heads.new_empty(heads.transpose(1, 2).shape).transpose(1, 2)
