"""The compiled code of product-key retrieval, and of gradients of scores, for float32 and bfloat16 on a CPU.

Shapes are as in `product_key_scores` and `headwise_lookup`. Each result is written by one thread, in the order of tokens, so it
does not depend on the number of threads or the other tokens of a call, bit for bit.
"""

import torch

from midus_hf.ops.dispatch.native.library import (
    LOOKUP_CALL,
    SCORE_GRADIENTS_CALL,
    address,
    gradient_rows,
    refuse_places,
    run,
    threads_for,
    with_rows,
)

_MOST_SUB_KEYS = 1 << 15
# Largest number of slots per head that C retrieves: C's cost per slot grows with k, and for larger k torch is faster.
_MOST_RETRIEVED = 64

# Least number of tokens per stretch. Gradients of tables are summed for each stretch first.
_STRETCH = 256

# Largest number of stretches of tokens.
_MOST_PARTS = 16

# Largest number to a multiple of which C pads the width of a row.
_MOST_LANES = 16

# Largest number of gradients that C writes: of query, row keys, column keys, transform and gathered values.
_RESULTS = 5


def native_refusal(n: int, k: int) -> str | None:
    """Return why the compiled code does not support these sizes, and which it expects; None if it does."""
    if n > _MOST_SUB_KEYS:
        return f"n is {n}; expected {_MOST_SUB_KEYS} or less"
    return f"k is {k}; expected {_MOST_RETRIEVED} or less" if k > _MOST_RETRIEVED else None


def native_score_gradients(
    gradient: torch.Tensor | None,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
    transform: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return gradients of query, row keys and column keys, in their dtype.

    With a transform, also return the gradients of the transform and of the gathered values, `[S, H, v]`, float32.

    Args:
        gradient: Gradient of the output of the lookup, `[S, H, v]`; None if `kept` has the gradients of scores.
        query: `[S, H, d]`.
        row_keys: `[H, n, d / 2]`.
        column_keys: `[H, n, d / 2]`.
        bank: `[N, v]` or `[H, N, v]`.
        kept: Slots `[S, H, k]` and their weights `[S, H, k]`; without `gradient`, the gradients of their scores instead
            of weights.
        transform: Matrix per head, `[H, v, v]`. Default: None, no transform.
    """
    slots, weights = kept
    tokens, heads, k = slots.shape
    (n, half), width = row_keys.shape[1:], bank.shape[-1]
    gradient, query = None if gradient is None else gradient_rows(gradient), with_rows(query)
    row_keys, column_keys, bank = row_keys.contiguous(), column_keys.contiguous(), bank.contiguous()
    slots, weights = slots.contiguous(), weights.contiguous()
    results = [tensor.new_empty(tensor.shape) for tensor in (query, row_keys, column_keys)]
    stretch = max(_STRETCH, -(-tokens // _MOST_PARTS))
    units = heads * -(-tokens // stretch)
    parts, transform_parts = weights.new_empty(units, 2 * n * half), None
    if transform is not None:
        transform = transform.contiguous()
        results += [transform.new_empty(transform.shape), weights.new_empty(tokens, heads, width)]
        transform_parts = weights.new_empty(units, width, -(-width // _MOST_LANES) * _MOST_LANES)
    tensors = (gradient, query, row_keys, column_keys, bank, transform, slots, weights)
    call = SCORE_GRADIENTS_CALL.pack(
        *(address(tensor) for tensor in tensors),
        *(address(tensor) for tensor in (*results, *(None,) * (_RESULTS - len(results)))),
        parts.data_ptr(),
        address(transform_parts),
        tokens,
        heads,
        n,
        half,
        width,
        k,
        *((0, 0) if gradient is None else gradient.stride()[:2]),
        *query.stride()[:2],
        n * n * width if bank.dim() == 3 else 0,
        query.dtype == torch.bfloat16,
        gradient is not None and gradient.dtype == torch.bfloat16,
        slots.itemsize,
        stretch,
        gradient is None,
        threads_for(tokens * heads),
    )
    run("midus_score_gradients", call)
    return tuple(results)


def native_scores(
    query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores, float32, descending, and the numbers, int64, of the k best slots: `[S, H, k]` each.

    Raises:
        ValueError: If a tensor is not on the CPU.
    """
    if not (query.is_cpu and row_keys.is_cpu and column_keys.is_cpu):
        refuse_places({"query": query, "row_keys": row_keys, "column_keys": column_keys})
    (tokens, heads, _), (_, n, half) = query.shape, row_keys.shape
    query, row_keys, column_keys = with_rows(query), row_keys.contiguous(), column_keys.contiguous()
    slots = query.new_empty(tokens, heads, k, dtype=torch.int64)
    scores = query.new_empty(tokens, heads, k, dtype=torch.float32)
    tensors = (query, row_keys, column_keys, None, None, None, None, slots, scores)
    sizes = (tokens, heads, n, half, 0, k, *query.stride()[:2], 0, 0, 0)
    narrow, raw = query.dtype == torch.bfloat16, True
    kinds = (narrow, False, slots.itemsize, raw, threads_for(tokens * heads))
    run("midus_lookup", LOOKUP_CALL.pack(*map(address, tensors), *sizes, *kinds))
    return scores, slots


def native_gradients_of_scores(
    gradient: torch.Tensor,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return gradients of query, row keys and column keys, in their dtype, for a gradient of scores, `[S, H, k]`."""
    weights, no_bank = gradient.float(), query.new_empty(0, 0)
    return native_score_gradients(None, query, row_keys, column_keys, no_bank, (slots, weights))
