"""What every body of head-wise lookup takes, and the room for what a gradient keeps."""

from typing import NamedTuple

import torch

from midus_hf.ops.dispatch.precision import narrowest_integer


class LookupInputs(NamedTuple):
    """The inputs of a lookup. Query and tables share a dtype; a residual may have another, which the output then has.

    Args:
        query: `[S, H, d]`.
        row_keys: `[H, n, d / 2]`.
        column_keys: `[H, n, d / 2]`.
        bank: `[N, v]`, or `[H, N, v]`.
        residual: `[S, H, v]`, added to what is retrieved; None for none.
        k: Slots retrieved per head.
        temperature: Scores are divided by it before the softmax.
    """

    query: torch.Tensor
    row_keys: torch.Tensor
    column_keys: torch.Tensor
    bank: torch.Tensor
    residual: torch.Tensor | None
    k: int
    temperature: float


def room_for_gradient(inputs: LookupInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots `[S, H, k]`, in the narrowest integers that hold n * n, and weights `[S, H, k]`, float32, to be filled."""
    query, n = inputs.query, inputs.row_keys.shape[1]
    shape = (*query.shape[:2], inputs.k)
    return query.new_empty(shape, dtype=narrowest_integer(n * n)), query.new_empty(shape, dtype=torch.float32)
