"""Product-key retrieval, head-wise lookup and gradients in C, for float32 and bfloat16 on a CPU.

One thread writes each result, in the order of tokens: neither the number of threads nor other tokens change a bit. All functions
raise a `ValueError` if a tensor is not on the CPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from midus_hf.ops.dispatch.calling import narrowest_integer
from midus_hf.ops.dispatch.library import (
    LOOKUP_CALL,
    NATIVE_DTYPES,
    SCORE_GRADIENTS_CALL,
    gradient_rows,
    refuse_places,
    run,
    with_rows,
)

_MAX_SUB_KEYS = 1 << 15
# Largest number of slots per head that C retrieves: C's cost per slot grows with k, and for larger k torch is faster.
_MAX_RETRIEVED = 64
# Least number of tokens per stretch, and largest number of stretches: gradients of tables are summed per stretch first.
_STRETCH = 256
_MAX_STRETCHES = 16
_MAX_LANES = 16  # C pads rows to a multiple of the lanes, at most this


class LookupInputs(NamedTuple):
    """Arguments of a lookup. Query and tables share a dtype; a residual's dtype is that of the output."""

    query: Tensor  # [S, H, d]
    row_keys: Tensor  # [H, n, d / 2]
    column_keys: Tensor  # [H, n, d / 2]
    bank: Tensor  # [N, v], or [H, N, v] with a bank per head
    # [H, v, v], for a bank that heads share: a matrix per head that multiplies the gathered sum
    transform: Tensor | None
    residual: Tensor | None  # [S, H, v], a summand of the output
    k: int  # slots retrieved per head


def room_for_gradient(inputs: LookupInputs) -> tuple[Tensor, Tensor]:
    """Return uninitialised slots, in the narrowest integers for n * n, and weights, float32: `[S, H, k]`."""
    query, n = inputs.query, inputs.row_keys.shape[1]
    shape = (*query.shape[:2], inputs.k)
    return query.new_empty(shape, dtype=narrowest_integer(n * n)), query.new_empty(shape, dtype=torch.float32)


def native_refusal(n: int, k: int) -> str | None:
    """Return why the compiled code does not support these sizes, and which it expects; None if it does."""
    if n > _MAX_SUB_KEYS:
        return f"n is {n}; expected {_MAX_SUB_KEYS} or less"
    return f"k is {k}; expected {_MAX_RETRIEVED} or less" if k > _MAX_RETRIEVED else None


def native_lookup(inputs: LookupInputs, keeps: bool) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return the output `[S, H, v]`, transformed in float32; if `keeps`, slots and weights `[S, H, k]`."""
    query, row_keys, column_keys, bank, transform, residual, _ = inputs
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
        refuse_places(dict(zip(names, inputs[:-1], strict=True)))
    width = bank.shape[-1]
    if residual is None:
        output = bank.new_empty((*query.shape[:2], width))
    else:
        output, residual = torch.empty_like(residual, memory_format=torch.contiguous_format), with_rows(residual)
    kept = room_for_gradient(inputs) if keeps else None
    bank, transform = bank.contiguous(), None if transform is None else transform.contiguous()
    _look_up(inputs, (bank, transform, residual, output, *(kept or (None, None))), width)
    return output, kept


def native_scores(query: Tensor, row_keys: Tensor, column_keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores, float32, descending, and numbers, int64, of the k best slots: `[S, H, k]` each."""
    if not (query.is_cpu and row_keys.is_cpu and column_keys.is_cpu):
        refuse_places({"query": query, "row_keys": row_keys, "column_keys": column_keys})
    slots = query.new_empty(*query.shape[:2], k, dtype=torch.int64)
    scores = query.new_empty(*query.shape[:2], k, dtype=torch.float32)
    inputs = LookupInputs(query, row_keys, column_keys, query, None, None, k)
    _look_up(inputs, (None, None, None, None, slots, scores), 0)
    return scores, slots


def _look_up(inputs: LookupInputs, tensors: tuple[Tensor | None, ...], width: int) -> None:
    """Call C with bank, transform, residual, output, slots and weights (scores without a bank)."""
    query, row_keys, column_keys = (
        with_rows(inputs.query),
        inputs.row_keys.contiguous(),
        inputs.column_keys.contiguous(),
    )
    bank, _, residual, _, slots, _ = tensors
    (tokens, heads, _), (_, n, half) = query.shape, row_keys.shape
    run(
        "midus_lookup",
        LOOKUP_CALL,
        tokens * heads,
        *(0 if each is None else each.data_ptr() for each in (query, row_keys, column_keys, *tensors)),
        *(tokens, heads, n, half, width, inputs.k),
        *query.stride()[:2],
        *((0, 0) if residual is None else residual.stride()[:2]),
        n * n * width if bank is not None and bank.dim() == 3 else 0,
        query.dtype == torch.bfloat16,
        residual is not None and residual.dtype == torch.bfloat16,
        0 if slots is None else slots.itemsize,
        bank is None,
    )


def native_score_gradients(
    gradient: Tensor | None,
    query: Tensor,
    row_keys: Tensor,
    column_keys: Tensor,
    slots: Tensor,
    looked_up: tuple[Tensor, Tensor],
    transform: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return gradients of query, row keys and column keys, in their dtype.

    With a transform, also return the gradients of the transform and of the gathered values, `[S, H, v]`, float32.

    Args:
        gradient: Gradient of the output of a lookup, `[S, H, v]`; None if `looked_up` has gradients of scores.
        query: `[S, H, d]`.
        row_keys: `[H, n, d / 2]`.
        column_keys: `[H, n, d / 2]`.
        slots: `[S, H, k]`.
        looked_up: Bank `[N, v]` or `[H, N, v]`, and weights `[S, H, k]`; without `gradient`, an unread tensor and gradients of
            scores, float32.
        transform: Matrix per head, `[H, v, v]`. Default: None, no transform.
    """
    bank, weights = looked_up
    tokens, heads, k = slots.shape
    (n, half), width = row_keys.shape[1:], bank.shape[-1] if gradient is not None else 0
    gradient, query = None if gradient is None else gradient_rows(gradient), with_rows(query)
    row_keys, column_keys, bank = row_keys.contiguous(), column_keys.contiguous(), bank.contiguous()
    slots, weights = slots.contiguous(), weights.contiguous()
    results = [tensor.new_empty(tensor.shape) for tensor in (query, row_keys, column_keys)]
    stretch = max(_STRETCH, -(-tokens // _MAX_STRETCHES))
    units = heads * -(-tokens // stretch)
    parts, transform_parts = weights.new_empty(units, 2 * n * half), None
    if transform is not None:
        transform = transform.contiguous()
        results += [transform.new_empty(transform.shape), weights.new_empty(tokens, heads, width)]
        transform_parts = weights.new_empty(units, width, -(-width // _MAX_LANES) * _MAX_LANES)
    tensors = (gradient, query, row_keys, column_keys, bank, transform, slots, weights)
    every = (*tensors, *results, *(None,) * (5 - len(results)), parts, transform_parts)
    run(
        "midus_score_gradients",
        SCORE_GRADIENTS_CALL,
        tokens * heads,
        *(0 if each is None else each.data_ptr() for each in every),
        *(tokens, heads, n, half, width, k),
        *((0, 0) if gradient is None else gradient.stride()[:2]),
        *query.stride()[:2],
        n * n * width if bank.dim() == 3 else 0,
        query.dtype == torch.bfloat16,
        gradient is not None and gradient.dtype == torch.bfloat16,
        slots.itemsize,
        stretch,
        gradient is None,
    )
    return tuple(results)
