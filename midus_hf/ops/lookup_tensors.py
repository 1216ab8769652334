"""What the kernels of head-wise lookup read and write, as they read and write it."""

from typing import NamedTuple

import torch

from midus_hf.ops.precision import narrowest_integer


class LookupTensors(NamedTuple):
    """Inputs that lie as kernels read them, and results to be filled.

    Args:
        query: `[S, H, 2 * half]`, whose last dimension lies together.
        row_keys: `[H, n, half]`, contiguous, as are the following.
        column_keys: `[H, n, half]`.
        bank: `[N, v]`, or `[H, N, v]`.
        residual: `[S, H, v]`; where there is none, the output, which is not read.
        output: `[S, H, v]`, in the dtype of the residual, or else of the bank.
        slots: `[S, H, k]`; where nothing is kept for a gradient, the output, which is not written as such.
        weights: `[S, H, k]`, likewise.
    """

    query: torch.Tensor
    row_keys: torch.Tensor
    column_keys: torch.Tensor
    bank: torch.Tensor
    residual: torch.Tensor
    output: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor


def room_for_gradient(query: torch.Tensor, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots `[S, H, k]`, in the narrowest integers that hold n * n, and weights `[S, H, k]`, float32, to be filled."""
    kept = (*query.shape[:2], k)
    return query.new_empty(kept, dtype=narrowest_integer(n * n)), query.new_empty(kept, dtype=torch.float32)


def lookup_tensors(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    residual: torch.Tensor | None,
    kept: tuple[torch.Tensor, torch.Tensor] | None,
) -> LookupTensors:
    """Lay out the inputs of a lookup, and make room for its output; `kept` is to be filled for a gradient."""
    tokens, heads, _ = query.shape
    output = (bank if residual is None else residual).new_empty(tokens, heads, bank.shape[-1])
    return LookupTensors(
        query if query.stride(-1) == 1 else query.contiguous(),
        row_keys.contiguous(),
        column_keys.contiguous(),
        bank.contiguous(),
        output if residual is None else residual.contiguous(),
        output,
        *((output, output) if kept is None else kept),
    )
