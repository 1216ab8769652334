"""Arguments that all bodies of head-wise lookup share, and tensors for what a gradient needs."""

from typing import NamedTuple

import torch

from midus_hf.ops.dispatch.precision import narrowest_integer


class LookupInputs(NamedTuple):
    """Arguments of a lookup. Query and tables share a dtype; a residual may have another, which is then the dtype of the output.

    Args:
        query: `[S, H, d]`.
        row_keys: `[H, n, d / 2]`.
        column_keys: `[H, n, d / 2]`.
        bank: `[N, v]`, or `[H, N, v]` with a bank per head.
        residual: Summand of the output, `[S, H, v]`, or None.
        k: Slots retrieved per head.
        temperature: Divisor of scores before the softmax.
    """

    query: torch.Tensor
    row_keys: torch.Tensor
    column_keys: torch.Tensor
    bank: torch.Tensor
    residual: torch.Tensor | None
    k: int
    temperature: float


def room_for_gradient(inputs: LookupInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised slots `[S, H, k]`, in the narrowest integers that hold n * n, and weights `[S, H, k]`, float32."""
    query, n = inputs.query, inputs.row_keys.shape[1]
    shape = (*query.shape[:2], inputs.k)
    return query.new_empty(shape, dtype=narrowest_integer(n * n)), query.new_empty(shape, dtype=torch.float32)
