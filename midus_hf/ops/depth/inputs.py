"""What every body of attention to the depth takes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class DepthInputs(NamedTuple):
    """Queries and the slots that they read. All tensors share a dtype.

    Args:
        query: `[B, H, T, d]`.
        keys: n of `[B, K, T, d]`, from 1; K divides H.
        values: n of `[B, K, T, d]`.
        scaling: By what scores are multiplied.
        softcap: What no score exceeds; None if scores are not capped.
    """

    query: torch.Tensor
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    scaling: float
    softcap: float | None


class DepthReading(NamedTuple):
    """What heads read of the depth, or the gradient of it.

    Args:
        output: `[B, H, T, d]`.
        lse: `[B, H, T]`, the logarithm of the sum of the exponentials of scores.
    """

    output: torch.Tensor
    lse: torch.Tensor


class Wanted(NamedTuple):
    """Which gradients are wanted.

    Args:
        query: Whether that of the query is.
        slots: Whether those of keys and values are.
    """

    query: bool = True
    slots: bool = True


def new_by_token(heads: torch.Tensor) -> torch.Tensor:
    """Return a new tensor `[B, H, T, d]` that lies in memory token by token, as C and kernels write theirs."""
    return heads.new_empty(heads.transpose(1, 2).shape).transpose(1, 2)
