"""Kernels that find the best slots of product keys and their scores, without holding the scores of all sub-keys in memory.

They select like the kernels of head-wise lookup: by all 32 bits of a score or, for half precision, by scores that carry
their column in their last bits.

Sizes are as in `product_key/triton/exact.py`.
"""

import torch

from midus_hf.ops.dispatch.tiles import tiles
from midus_hf.ops.dispatch.triton import on_device_of, quotient_above, tl, triton
from midus_hf.ops.product_key.triton.exact import (
    FEW_TOKENS,
    HEADS_TOGETHER,
    best_slots_of_keys,
    exact_tile,
    token_block_and_head,
    wide_products,
)
from midus_hf.ops.product_key.triton.packed import (
    LOWEST,
    best_slots_of_block,
    packed_tile,
    packs,
    smaller,
    stacked,
    store_tile,
    turned_keys,
)

# Most bytes of sub-keys and queries that a program multiplies: every GPU that kernels run on has this much shared
# memory.
_MOST_SHARED_BYTES = 96 * 1024

# Most float32 sub-keys per side: with more, a program goes through stretches and spills some ten thousand bytes per
# thread.
_MOST_WIDE_SUB_KEYS = 128


def scores_refusal(dtype: torch.dtype, n: int, k: int, half: int, exact: bool) -> str | None:
    """Return why these kernels refuse these sizes, and which they expect; None if they take them."""
    if dtype == torch.float32 and n > _MOST_WIDE_SUB_KEYS:
        return f"{n} sub-keys a side are float32; expected {_MOST_WIDE_SUB_KEYS} or fewer, or half precision"
    if not exact and packs(dtype, n, k):
        tile, sides = packed_tile({}, n, k, half, False), 2
    else:
        tile, sides = exact_tile({}, n, k, half, False, dtype == torch.float32), 1
    held = sides * (tile["BN"] + tile["BT"]) * tile["DP"] * dtype.itemsize
    if held > _MOST_SHARED_BYTES:
        return f"sub-keys are {half} wide, of which a program would hold {held:,} bytes; expected {_MOST_SHARED_BYTES:,} or fewer"
    return None


@triton.jit
def scores_kernel(
    query, row_keys, column_keys, scores, slots, tokens, heads, n, half, token_stride, head_stride,
    WIDE: tl.constexpr, TOGETHER: tl.constexpr, ONE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write the scores and numbers [S, H, K] of the best slots; the query [S, H, 2 * half] has contiguous rows."""
    block, head = token_block_and_head(tokens, heads, BT, TOGETHER)
    token = block * BT + tl.arange(0, BT)
    valid = token < tokens
    best_scores, chosen = best_slots_of_keys(
        query, row_keys, column_keys, token, head, valid, n, half, token_stride, head_stride, WIDE, ONE, K, KP, BT, BN, DP,
    )  # fmt: skip
    ranks = tl.arange(0, KP)
    entries = ((token * heads + head) * K)[:, None] + ranks[None, :]
    rank_mask = valid[:, None] & (ranks < K)[None, :]
    tl.store(scores + entries, best_scores, mask=rank_mask)
    tl.store(slots + entries, chosen.to(tl.int64), mask=rank_mask)


@triton.jit
def packed_scores_kernel(
    query, row_keys, column_keys, scores, slots, tokens, token_stride, head_stride,
    HEADS: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, IS_EVEN: tl.constexpr, WIDE: tl.constexpr,
    TOGETHER: tl.constexpr, BITS: tl.constexpr, RANK_BITS: tl.constexpr, LOWEST: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write the results of `scores_kernel` by packed scores; IS_EVEN says that tokens fill all blocks."""
    block, head = token_block_and_head(tokens, HEADS, BT, TOGETHER)
    keys_of_head = head * (N * HALF)
    rows_of_head = turned_keys(row_keys + keys_of_head, N, HALF, BN, DP)
    columns_of_head = turned_keys(column_keys + keys_of_head, N, HALF, BN, DP)
    first, token = block * BT, tl.arange(0, BT)
    valid = first + token < tokens
    best = best_slots_of_block(
        query, rows_of_head, columns_of_head, first, head, valid, token_stride, head_stride,
        N, HALF, IS_EVEN, WIDE, BITS, RANK_BITS, LOWEST, K, KP, BT, BN, DP,
    )  # fmt: skip
    descending, chosen = best[:1], best[K:]
    for rank in tl.static_range(1, K):  # its tag may have raised a sum above the first, which has no tag
        descending = descending + (smaller(best[rank], descending[rank - 1]),)
    for _ in tl.static_range(KP - K):
        descending, chosen = descending + (best[0],), chosen + (best[K],)
    ranks = tl.arange(0, KP)
    before = (first * HEADS + head) * K
    entries = token[:, None] * (HEADS * K) + ranks[None, :]  # [BT, KP]
    rank_mask = valid[:, None] & (ranks < K)[None, :]
    store_tile(scores + before + entries, stacked(descending), rank_mask, IS_EVEN and K == KP)
    store_tile(slots + before + entries, stacked(chosen), rank_mask, IS_EVEN and K == KP)


_packed_tile = tiles("packed_scores_kernel", BT=(16, 128), num_warps=(1, 8))(packed_tile)
_exact_tile = tiles("scores_kernel", BT=(16, 64), num_warps=(2, 8))(exact_tile)


def triton_scores(
    query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, k: int, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores, float32, descending, and slots, int64, `[S, H, k]` each, of the best slots for a query `[S, H, d]`.

    With `exact`, the kernel that compares all bits of scores is chosen.
    """
    query = query if query.stride(-1) == 1 else query.contiguous()
    row_keys, column_keys = row_keys.contiguous(), column_keys.contiguous()
    (tokens, heads, _), (_, n, half) = query.shape, row_keys.shape
    scores = query.new_empty(tokens, heads, k, dtype=torch.float32)
    slots = query.new_empty(tokens, heads, k, dtype=torch.int64)
    if not tokens:
        return scores, slots
    there = (query, row_keys, column_keys, scores, slots, tokens)
    strides, is_wide = (query.stride(0), query.stride(1)), wide_products(query, row_keys)
    with on_device_of(query):
        if not exact and packs(query.dtype, n, k):
            tile = _packed_tile(query.device, n, k, half, tokens <= FEW_TOKENS)
            packed_scores_kernel[(quotient_above(tokens, tile["BT"]) * heads,)](
                *there, *strides, HEADS=heads, N=n, HALF=half, IS_EVEN=tokens % tile["BT"] == 0,
                WIDE=is_wide, TOGETHER=HEADS_TOGETHER, LOWEST=LOWEST, K=k, **tile,
            )  # fmt: skip
        else:
            tile = _exact_tile(query.device, n, k, half, tokens <= FEW_TOKENS, is_wide)
            scores_kernel[(quotient_above(tokens, tile["BT"]) * heads,)](
                *there, heads, n, half, *strides, WIDE=is_wide, TOGETHER=HEADS_TOGETHER, K=k, **tile
            )
    return scores, slots
