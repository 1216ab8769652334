"""The compiled code of head-wise lookup, for float32 and bfloat16 on a CPU.

Shapes are as in `headwise_lookup`. Each result is written by one thread, in the order of tokens, so it does not depend on the
number of threads or the other tokens of a call, bit for bit.
"""

from typing import NamedTuple

import torch

from midus_hf.ops.dispatch.native.library import (
    LOOKUP_CALL,
    NATIVE_DTYPES,
    refuse_places,
    run,
    threads_for,
    with_rows,
)
from midus_hf.ops.dispatch.precision import narrowest_integer


class LookupInputs(NamedTuple):
    """Arguments of a lookup. Query and tables share a dtype; a residual may have another, which is then the dtype of the output.

    Args:
        query: `[S, H, d]`.
        row_keys: `[H, n, d / 2]`.
        column_keys: `[H, n, d / 2]`.
        bank: `[N, v]`, or `[H, N, v]` with a bank per head.
        transform: Matrix per head, `[H, v, v]`, for a bank that heads share, which multiplies the gathered sum; or None.
        residual: Summand of the output, `[S, H, v]`, or None.
        k: Slots retrieved per head.
    """

    query: torch.Tensor
    row_keys: torch.Tensor
    column_keys: torch.Tensor
    bank: torch.Tensor
    transform: torch.Tensor | None
    residual: torch.Tensor | None
    k: int


def room_for_gradient(inputs: LookupInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised slots `[S, H, k]`, in the narrowest integers that hold n * n, and weights `[S, H, k]`, float32."""
    query, n = inputs.query, inputs.row_keys.shape[1]
    shape = (*query.shape[:2], inputs.k)
    return query.new_empty(shape, dtype=narrowest_integer(n * n)), query.new_empty(shape, dtype=torch.float32)


def native_lookup(inputs: LookupInputs, keeps: bool) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return the output `[S, H, v]`, and, if `keeps`, slots and weights `[S, H, k]` for a gradient.

    Transforms multiply gathered sums in float32, before rounding.

    Raises:
        ValueError: If a tensor is not on the CPU.
    """
    query, row_keys, column_keys, bank, transform, residual, k = inputs
    if residual is not None and residual.dtype not in NATIVE_DTYPES:
        output, kept = native_lookup(inputs._replace(residual=None), keeps)
        return (residual + output).to(residual.dtype), kept
    if not (
        query.is_cpu
        and row_keys.is_cpu
        and column_keys.is_cpu
        and bank.is_cpu
        and (transform is None or transform.is_cpu)
        and (residual is None or residual.is_cpu)
    ):
        names = ("query", "row_keys", "column_keys", "value_bank", "value_transform", "residual")
        tensors = (query, row_keys, column_keys, bank, transform, residual)
        refuse_places(dict(zip(names, tensors, strict=True)))
    (tokens, heads, _), (_, n, half), width = query.shape, row_keys.shape, bank.shape[-1]
    query, residual = with_rows(query), None if residual is None else with_rows(residual)
    row_keys, column_keys, bank = row_keys.contiguous(), column_keys.contiguous(), bank.contiguous()
    transform = None if transform is None else transform.contiguous()
    if residual is None:
        output = bank.new_empty((tokens, heads, width))
    else:
        output = torch.empty_like(residual, memory_format=torch.contiguous_format)
    kept = room_for_gradient(inputs) if keeps else None
    slots, weights = kept or (None, None)
    call = LOOKUP_CALL.pack(
        query.data_ptr(),
        row_keys.data_ptr(),
        column_keys.data_ptr(),
        bank.data_ptr(),
        0 if transform is None else transform.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        output.data_ptr(),
        0 if slots is None else slots.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        tokens,
        heads,
        n,
        half,
        width,
        k,
        *query.stride()[:2],
        *((0, 0) if residual is None else residual.stride()[:2]),
        n * n * width if bank.dim() == 3 else 0,
        query.dtype == torch.bfloat16,
        residual is not None and residual.dtype == torch.bfloat16,
        0 if slots is None else slots.itemsize,
        False,
        threads_for(tokens * heads),
    )
    run("midus_lookup", call)
    return output, kept
