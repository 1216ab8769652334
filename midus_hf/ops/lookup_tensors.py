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
        slots: `[S, H, k]`, in the narrowest integers that hold n * n.
        weights: `[S, H, k]`, float32.
    """

    query: torch.Tensor
    row_keys: torch.Tensor
    column_keys: torch.Tensor
    bank: torch.Tensor
    residual: torch.Tensor
    output: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor


def lookup_tensors(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    residual: torch.Tensor | None,
    k: int,
) -> LookupTensors:
    """Lay out the inputs of a lookup, and make room for its results."""
    tokens, heads, _ = query.shape
    output = (bank if residual is None else residual).new_empty(tokens, heads, bank.shape[-1])
    return LookupTensors(
        query if query.stride(-1) == 1 else query.contiguous(),
        row_keys.contiguous(),
        column_keys.contiguous(),
        bank.contiguous(),
        output if residual is None else residual.contiguous(),
        output,
        torch.empty(tokens, heads, k, dtype=narrowest_integer(row_keys.shape[1] ** 2), device=query.device),
        torch.empty(tokens, heads, k, dtype=torch.float32, device=query.device),
    )
