"""Kernels that select product keys without storing all sub-keys' scores, and gradients through these.

Gradients of a token's scores are spread over a tile, each at the column of its sub-key. Tensor cores multiply the tile with sub-keys
for the gradient of the queries, and with queries for that of the sub-keys, which a program sums over many tokens. For bfloat16, the
tile is rounded to bfloat16 before, as the resulting gradients are afterwards.

Sizes: S tokens, H heads; `BT` tokens per program or at a time, `BN` sub-keys per stretch; `KP`, `DP` and `VP` the powers of two at or
above k, d / 2 and v.
"""

import functools

import torch
from torch import Tensor

from midus_hf.ops.dispatch.triton import (
    Tile,
    interprets_kernels,
    on_device_of,
    power_of_two,
    precise_product,
    product,
    quotient_above,
    tl,
    triton,
    wide_ranged_product,
)

# Heads whose programs run together: their inputs for a token are adjacent in memory, and gathered rows stay in cache.
HEADS_TOGETHER = 8
# Maximum bytes of sub-keys and queries that a program multiplies: every supported GPU has this much shared memory.
_MAX_SHARED_BYTES = 96 * 1024
# Maximum float32 sub-keys per side: with more, a program goes through stretches and spills some 10 kB per thread.
_MAX_WIDE_SUB_KEYS = 128
# Minimum rows of a matrix product, and so the rows that are computed for the few tokens of a decoding step.
FEW_TOKENS = 16


@triton.jit
def token_block_and_head(tokens, heads, BT, TOGETHER: tl.constexpr):
    """Return this program's block of BT tokens and head; programs go through the heads by groups."""
    program = tl.program_id(0)
    blocks = tl.cdiv(tokens, BT)
    group = program // (TOGETHER * blocks)
    members = tl.minimum(heads - group * TOGETHER, TOGETHER)
    within = program % (TOGETHER * blocks)
    return (within // members).to(tl.int64), (group * TOGETHER + within % members).to(tl.int64)


@triton.jit
def pick(values, places, KP: tl.constexpr):
    """Return `values[t, places[t]]` for values [BT, KP]; 0 for places outside 0 to KP - 1."""
    ranks = tl.arange(0, KP)
    return tl.sum(tl.where(ranks[None, :] == places[:, None], values, 0), axis=1)


@triton.jit
def best_columns(scores, start, n, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr):
    """Return the K largest of rows of `scores` [BT, BN], descending, and columns from `start`: [BT, KP].

    Among equal scores, the first comes first. Ranks K to KP - 1 hold minus infinity and column 0. Columns stay below n even with NaN.
    """
    columns = tl.arange(0, BN)
    ranks = tl.arange(0, KP)
    values = tl.full([BT, KP], float("-inf"), tl.float32)
    chosen = tl.zeros([BT, KP], tl.int32)
    for rank in range(K):
        top, column = tl.max(scores, axis=1, return_indices=True)  # [BT]
        values = tl.where(ranks[None, :] == rank, top[:, None], values)
        chosen = tl.where(ranks[None, :] == rank, tl.minimum(column + start, n - 1)[:, None], chosen)
        scores = tl.where(columns[None, :] == column[:, None], float("-inf"), scores)
    return values, chosen


@triton.jit
def merge_best(values, chosen, more_values, more_chosen, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr):
    """Return the K largest of two descending lists, [BT, KP], with columns; ties go to the first list."""
    ranks = tl.arange(0, KP)
    merged = tl.full([BT, KP], float("-inf"), tl.float32)
    merged_chosen = tl.zeros([BT, KP], tl.int32)
    taken = tl.zeros([BT], tl.int32)
    more_taken = tl.zeros([BT], tl.int32)
    for rank in range(K):
        first, second = pick(values, taken, KP), pick(more_values, more_taken, KP)
        take_first = first >= second
        value = tl.where(take_first, first, second)
        column = tl.where(take_first, pick(chosen, taken, KP), pick(more_chosen, more_taken, KP))
        merged = tl.where(ranks[None, :] == rank, value[:, None], merged)
        merged_chosen = tl.where(ranks[None, :] == rank, column[:, None], merged_chosen)
        taken += take_first.to(tl.int32)
        more_taken += 1 - take_first.to(tl.int32)
    return merged, merged_chosen


@triton.jit
def next_pair(sums, next_column, row_values, column_values, K: tl.constexpr, KP: tl.constexpr):
    """Return the best remaining pair's sum and ranks [BT], then `sums` and `next_column` without it.

    Columns descend, so for each row rank only the best unpaired column, `next_column` [BT, KP], with sums `sums` [BT, KP], can come
    next. K calls merge K descending lists, which gives the K best of all pairs.
    """
    ranks = tl.arange(0, KP)
    score, row_rank = tl.max(sums, axis=1, return_indices=True)
    column_rank = pick(next_column, row_rank, KP)
    following = tl.where(column_rank + 1 < K, pick(column_values, column_rank + 1, KP), float("-inf"))
    following += pick(row_values, row_rank, KP)
    here = ranks[None, :] == row_rank[:, None]
    return score, row_rank, column_rank, tl.where(here, following[:, None], sums), next_column + here.to(tl.int32)


@triton.jit
def best_of_key_stretch(
    query, keys, n, half, start, WIDE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Return scores and numbers of the K best of BN keys [n, half] from `start` per query [BT, DP]."""
    dims = tl.arange(0, DP)
    columns = start + tl.arange(0, BN)
    mask = (dims < half)[:, None] & (columns < n)[None, :]
    part = tl.load(keys + columns[None, :] * half + dims[:, None], mask=mask, other=0.0)  # [DP, BN]
    if WIDE:
        scores = tl.dot(query.to(tl.float32), part.to(tl.float32), input_precision="ieee")
    else:
        scores = tl.dot(query, part)
    scores = tl.where((columns < n)[None, :], scores, float("-inf"))
    return best_columns(scores, start, n, K, KP, BT, BN)


@triton.jit
def best_of_keys(
    query, keys, n, half, WIDE: tl.constexpr, ONE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Return scores and numbers of the K best of keys [n, half] per query [BT, DP], by stretches of BN."""
    values, chosen = best_of_key_stretch(query, keys, n, half, 0, WIDE, K, KP, BT, BN, DP)
    if not ONE:
        for start in range(BN, n, BN):
            more_values, more_chosen = best_of_key_stretch(query, keys, n, half, start, WIDE, K, KP, BT, BN, DP)
            values, chosen = merge_best(values, chosen, more_values, more_chosen, K, KP, BT)
    return values, chosen


@triton.jit
def best_slots_of_keys(
    query, row_keys, column_keys, token, head, valid, n, half, token_stride, head_stride,
    WIDE: tl.constexpr, ONE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Return the scores of the K best slots per token for a head, descending, and the slots: [BT, KP]."""
    dims, ranks = tl.arange(0, DP), tl.arange(0, KP)
    query_pointers = query + token[:, None] * token_stride + head * head_stride + dims[None, :]
    mask = valid[:, None] & (dims < half)[None, :]
    keys_of_head = head * n * half
    row_query = tl.load(query_pointers, mask=mask, other=0.0)
    row_values, rows = best_of_keys(row_query, row_keys + keys_of_head, n, half, WIDE, ONE, K, KP, BT, BN, DP)
    column_query = tl.load(query_pointers + half, mask=mask, other=0.0)
    column_values, columns = best_of_keys(
        column_query, column_keys + keys_of_head, n, half, WIDE, ONE, K, KP, BT, BN, DP
    )
    # Every row rank starts with the best column.
    sums = row_values + pick(column_values, tl.zeros([BT], tl.int32), KP)[:, None]
    next_column = tl.zeros([BT, KP], tl.int32)
    scores = tl.full([BT, KP], float("-inf"), tl.float32)
    chosen = tl.zeros([BT, KP], tl.int32)
    for rank in range(K):
        score, i, j, sums, next_column = next_pair(sums, next_column, row_values, column_values, K, KP)
        slot = pick(rows, i, KP) * n + pick(columns, j, KP)
        scores = tl.where(ranks[None, :] == rank, score[:, None], scores)
        chosen = tl.where(ranks[None, :] == rank, slot[:, None], chosen)
    return scores, chosen


def selection_tile(n: int, k: int, half: int, few: bool, is_wide: bool, lanes: int = 1) -> Tile:
    """Return the sizes of a program that selects, with tiles, also of `lanes` columns, of at most 8,192.

    A program takes at most 128 sub-keys at a time, and 16 to 64 tokens with about 4,096 scores in all; for the `few` tokens of
    decoding, as few rows as a product has, and as few warps as hold them in registers. On compute capability 9.0, two warps need no
    more than 168 registers per thread, but spill some hundreds of bytes if products of float32 have more than 64 sub-keys at a time.
    """
    stretch, ranks = min(128, max(16, power_of_two(n))), power_of_two(k)
    dims = max(16, power_of_two(half))
    tokens = max(16, min(64, 4096 // max(stretch, ranks), 8192 // max(dims, lanes)))
    tile = {"ONE": n <= stretch, "KP": ranks, "BT": tokens, "BN": stretch, "DP": dims, "num_warps": 4}
    return tile | ({"BT": FEW_TOKENS, "num_warps": 4 if is_wide and stretch > 64 else 2} if few else {})


cached_tile = functools.cache(selection_tile)  # Dynamo traces calls of `selection_tile`, and warns of cached functions


def wide_products(query: Tensor, keys: Tensor) -> bool:
    """Return whether products are in float32: for float32 queries, mixed dtypes, and the interpreter."""
    return query.dtype == torch.float32 or query.dtype != keys.dtype or interprets_kernels()


def scores_refusal(dtype: torch.dtype, n: int, k: int, half: int) -> str | None:
    """Return why these kernels do not support these sizes, and which they expect; None if they do."""
    if dtype == torch.float32 and n > _MAX_WIDE_SUB_KEYS:
        return f"{n} sub-keys per side are float32; expected {_MAX_WIDE_SUB_KEYS} or fewer, or half precision"
    tile = selection_tile(n, k, half, False, dtype == torch.float32)
    held = (tile["BN"] + tile["BT"]) * tile["DP"] * dtype.itemsize
    if held > _MAX_SHARED_BYTES:
        return f"sub-keys are {half} wide, of which a program would hold {held:,} bytes; expected {_MAX_SHARED_BYTES:,} or fewer"
    return None


@triton.jit
def scores_kernel(
    query, row_keys, column_keys, scores, slots, tokens, heads, n, half, token_stride, head_stride,
    WIDE: tl.constexpr, TOGETHER: tl.constexpr, ONE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write scores and numbers [S, H, K] of the best slots; rows of the query are contiguous."""
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


def triton_scores(query: Tensor, row_keys: Tensor, column_keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores, float32, descending, and slots, int64, `[S, H, k]`, for a query `[S, H, d]`."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    row_keys, column_keys = row_keys.contiguous(), column_keys.contiguous()
    (tokens, heads, _), (_, n, half) = query.shape, row_keys.shape
    scores = query.new_empty(tokens, heads, k, dtype=torch.float32)
    slots = query.new_empty(tokens, heads, k, dtype=torch.int64)
    if tokens:
        is_wide = wide_products(query, row_keys)
        tile = cached_tile(n, k, half, tokens <= FEW_TOKENS, is_wide)
        with on_device_of(query):
            scores_kernel[(quotient_above(tokens, tile["BT"]) * heads,)](
                query, row_keys, column_keys, scores, slots, tokens, heads, n, half, query.stride(0), query.stride(1),
                WIDE=is_wide, TOGETHER=HEADS_TOGETHER, K=k, **tile,
            )  # fmt: skip
    return scores, slots


# Maximum programs, each with separate sums for sub-keys, which are read back: they fill a GPU several times.
_MAX_PROGRAMS = 1024

_MAX_SUMS = 1 << 26  # maximum elements of all these sums together: 256 MB


@triton.jit
def weight_gradient(upstream, bank, slots, valid, lane_mask, N: tl.constexpr, WIDTH: tl.constexpr, VP: tl.constexpr):
    """Return the products [BT] of gradients [BT, VP] with the rows of the slots at pointers `slots` [BT]."""
    slot = tl.load(slots, mask=valid, other=0)
    # In a large bank, offsets of rows may exceed 32 bits.
    slot = slot.to(tl.int64) if N * N * WIDTH >= 1 << 31 else slot.to(tl.int32)
    row = tl.load(bank + (slot[:, None] * WIDTH + tl.arange(0, VP)[None, :]), mask=lane_mask, other=0.0)
    return tl.sum(row.to(tl.float32) * upstream, axis=1)


@triton.jit
def score_gradients(
    gradient, bank, slots, weights, first, valid, HEADS: tl.constexpr, N: tl.constexpr,
    WIDTH: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Return gradients of a block's scores, through the softmax, and their slots: [BT, KP] each."""
    row_offset = tl.arange(0, BT) * HEADS  # counted from the first token, so that 32 bits suffice
    lanes, ranks = tl.arange(0, VP), tl.arange(0, KP)
    lane_mask = valid[:, None] & (lanes < WIDTH)[None, :]
    upstream = gradient + first * WIDTH + (row_offset[:, None] * WIDTH + lanes[None, :])
    upstream = tl.load(upstream, mask=lane_mask, other=0.0).to(tl.float32)
    into_weights = tl.zeros([BT, KP], tl.float32)
    slots_of_block = slots + first * K + row_offset * K
    if K <= 8:
        for rank in tl.static_range(K):  # unrolled, so that the loads of all rows overlap
            into_weight = weight_gradient(upstream, bank, slots_of_block + rank, valid, lane_mask, N, WIDTH, VP)
            into_weights = tl.where(ranks[None, :] == rank, into_weight[:, None], into_weights)
    else:
        for rank in range(K):
            into_weight = weight_gradient(upstream, bank, slots_of_block + rank, valid, lane_mask, N, WIDTH, VP)
            into_weights = tl.where(ranks[None, :] == rank, into_weight[:, None], into_weights)
    rank_mask = valid[:, None] & (ranks < K)[None, :]
    entries = first * K + (row_offset[:, None] * K + ranks[None, :])
    shares = tl.load(weights + entries, mask=rank_mask, other=0.0)
    chosen = tl.load(slots + entries, mask=rank_mask, other=0).to(tl.int32)
    mean = tl.sum(shares * into_weights, axis=1)
    return shares * (into_weights - mean[:, None]), chosen


@triton.jit
def given_gradients(
    gradient, slots, first, valid, HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr
):
    """Load a block's gradients of scores from [S, H, K], and their slots: [BT, KP] each."""
    ranks = tl.arange(0, KP)
    entries = first * K + (tl.arange(0, BT)[:, None] * (HEADS * K) + ranks[None, :])
    rank_mask = valid[:, None] & (ranks < K)[None, :]
    chosen = tl.load(slots + entries, mask=rank_mask, other=0).to(tl.int32)
    return tl.load(gradient + entries, mask=rank_mask, other=0.0).to(tl.float32), chosen


@triton.jit
def spread_scores(scores, chosen, start, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr):
    """Return scores [BT, KP] at columns of BN sub-keys from `start`, [BT, BN], those of one key added."""
    columns = start + tl.arange(0, BN)
    ranks = tl.arange(0, KP)
    spread = tl.zeros([BT, BN], tl.float32)
    for rank in range(K):
        here = ranks[None, :] == rank
        column = tl.sum(tl.where(here, chosen, 0), axis=1)
        score = tl.sum(tl.where(here, scores, 0.0), axis=1)
        spread = tl.where(columns[None, :] == column[:, None], spread + score[:, None], spread)
    return spread


@triton.jit
def load_keys(keys, start, N: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr):
    indices, dims = start + tl.arange(0, BN), tl.arange(0, DP)
    mask = (indices < N)[:, None] & (dims < HALF)[None, :]
    return tl.load(keys + indices[:, None] * HALF + dims[None, :], mask=mask, other=0.0)


@triton.jit
def add_to_keys(
    total, into_keys, start, ADDS: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Write gradients [BN, DP] of sub-keys from `start`; if ADDS, add what this program wrote before."""
    indices, dims = start + tl.arange(0, BN), tl.arange(0, DP)
    there = into_keys + indices[:, None] * HALF + dims[None, :]
    mask = (indices < N)[:, None] & (dims < HALF)[None, :]
    if ADDS:
        total += tl.load(there, mask=mask, other=0.0)
    tl.store(there, total, mask=mask)


@triton.jit
def side_gradients(
    scores, columns, keys, key_stretch, query_pointers, into_query, into_keys, total, dim_mask,
    ONE: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store half of the queries' gradient; sum sub-keys' in the returned `total` (ONE stretch) or memory."""
    part = tl.load(query_pointers, mask=dim_mask, other=0.0)
    if ONE:
        spread = spread_scores(scores, columns, 0, K, KP, BT, BN)
        into = product(spread, key_stretch, PRECISION)
        total += product(tl.trans(spread), part, PRECISION)
    else:
        into = tl.zeros([BT, DP], tl.float32)
        for start in range(0, N, BN):
            spread = spread_scores(scores, columns, start, K, KP, BT, BN)
            into += product(spread, load_keys(keys, start, N, HALF, BN, DP), PRECISION)
            add_to_keys(product(tl.trans(spread), part, PRECISION), into_keys, start, True, N, HALF, BN, DP)
            tl.debug_barrier()  # other threads read next what this thread wrote
    tl.store(into_query, into.to(into_query.dtype.element_ty), mask=dim_mask)
    return total


@triton.jit
def score_gradient_kernel(
    gradient, query, row_keys, column_keys, bank, slots, weights, into_query, partial,
    tokens, token_stride, head_stride, blocks_a_split,
    OF_LOOKUP: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    HAS_OWN_BANKS: tl.constexpr, ONE: tl.constexpr, PRECISION: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Write gradients of the query [S, H, 2 * HALF], and of sub-keys [splits, 2, H, N, HALF], float32.

    If OF_LOOKUP, `gradient` is the gradient of the output of a lookup, [S, H, WIDTH], else of scores, [S, H, K].
    """
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    split = tl.program_id(0) // HEADS
    dims, index = tl.arange(0, DP), tl.arange(0, BT)
    bank_of_head = bank + (head * (N * N * WIDTH) if HAS_OWN_BANKS else 0)
    rows, columns = row_keys + head * (N * HALF), column_keys + head * (N * HALF)
    # With one stretch, sub-keys stay in shared memory or registers, and sums in registers; otherwise both are in global memory.
    row_stretch, column_stretch = load_keys(rows, 0, N, HALF, BN, DP), load_keys(columns, 0, N, HALF, BN, DP)
    row_total, column_total = tl.zeros([BN, DP], tl.float32), tl.zeros([BN, DP], tl.float32)
    into_rows = partial + (split.to(tl.int64) * (2 * HEADS) + head) * (N * HALF)
    into_columns = into_rows + HEADS * N * HALF
    for block in range(split * blocks_a_split, (split + 1) * blocks_a_split):
        token = tl.cast(block, tl.int64) * BT
        valid = token + index < tokens
        first = token * HEADS + head
        if OF_LOOKUP:
            scores, chosen = score_gradients(
                gradient, bank_of_head, slots, weights, first, valid, HEADS, N, WIDTH, K, KP, BT, VP
            )
        else:
            scores, chosen = given_gradients(gradient, slots, first, valid, HEADS, K, KP, BT)
        dim_mask = valid[:, None] & (dims < HALF)[None, :]
        query_pointers = (
            query + token * token_stride + head * head_stride + (index[:, None] * token_stride + dims[None, :])
        )
        there = into_query + first * (2 * HALF) + (index[:, None] * (2 * HEADS * HALF) + dims[None, :])
        row_total = side_gradients(
            scores, chosen // N, rows, row_stretch, query_pointers, there, into_rows, row_total, dim_mask,
            ONE, PRECISION, N, HALF, K, KP, BT, BN, DP,
        )  # fmt: skip
        column_total = side_gradients(
            scores, chosen % N, columns, column_stretch, query_pointers + HALF, there + HALF, into_columns, column_total, dim_mask,
            ONE, PRECISION, N, HALF, K, KP, BT, BN, DP,
        )  # fmt: skip
    if ONE:
        add_to_keys(row_total, into_rows, 0, False, N, HALF, BN, DP)
        add_to_keys(column_total, into_columns, 0, False, N, HALF, BN, DP)


def triton_score_gradients(
    gradient: Tensor,
    query: Tensor,
    row_keys: Tensor,
    column_keys: Tensor,
    slots: Tensor,
    looked_up: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, row keys and column keys.

    `gradient` is that of the scores of slots `[S, H, k]`, or `[S, H, v]`, that of a lookup whose bank and weights are `looked_up`.
    """
    query = query if query.stride(-1) == 1 else query.contiguous()
    gradient, row_keys, column_keys = gradient.contiguous(), row_keys.contiguous(), column_keys.contiguous()
    (tokens, heads, k), (_, n, half) = slots.shape, row_keys.shape
    if not tokens:
        return torch.zeros_like(query), torch.zeros_like(row_keys), torch.zeros_like(column_keys)
    bank, weights = looked_up or (gradient, gradient)  # stand-ins that are not read
    bank, width = bank.contiguous(), bank.shape[-1] if looked_up else 1
    into_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    tile = _gradient_tile(n, k, half, width, query.dtype == torch.float32)
    blocks = quotient_above(tokens, tile["BT"])
    splits_at_most = max(1, min(_MAX_PROGRAMS // heads, _MAX_SUMS // (2 * heads * n * half)))
    blocks_a_split = quotient_above(blocks, splits_at_most)
    splits = quotient_above(blocks, blocks_a_split)
    # Gradients may leave the small range of float16, but not the range of TF32.
    precision = precise_product() if query.dtype == torch.float32 or interprets_kernels() else None
    precision = wide_ranged_product() if precision is None and query.dtype == torch.float16 else precision
    allocate = torch.empty if tile["ONE"] else torch.zeros
    partial = allocate(splits, 2, heads, n, half, dtype=torch.float32, device=query.device)
    with on_device_of(query):
        score_gradient_kernel[(heads * splits,)](
            gradient, query, row_keys, column_keys, bank, slots, weights, into_query, partial,
            tokens, query.stride(0), query.stride(1), blocks_a_split,
            OF_LOOKUP=looked_up is not None, HEADS=heads, N=n, HALF=half, WIDTH=width,
            HAS_OWN_BANKS=looked_up is not None and bank.dim() == 3, PRECISION=precision, K=k, **tile,
        )  # fmt: skip
    into_row_keys, into_column_keys = (partial[:, side].sum(0).to(row_keys.dtype) for side in (0, 1))
    return into_query, into_row_keys, into_column_keys


@functools.cache
def _gradient_tile(n: int, k: int, half: int, width: int, is_wide: bool) -> Tile:
    """Return a program's sizes, with 168 registers if three programs then fit a multiprocessor."""
    dims, lanes = max(16, power_of_two(half)), power_of_two(width)
    stretch = max(16, min(64, power_of_two(n), 8192 // dims))
    tile = {
        "ONE": n <= stretch,
        "KP": power_of_two(k),
        "BT": max(16, min(64, 8192 // max(dims, lanes))),
        "BN": stretch,
        "DP": dims,
        "VP": lanes,
        "num_warps": 4 if dims <= 64 else 8,
        "num_stages": 1,  # prefetched rows of the next block would take registers and shared memory from other programs
    }
    fits = not is_wide and max(2 * dims, lanes) <= 64 and (tile["BT"], tile["num_warps"]) == (64, 4)
    return tile | ({"maxnreg": 168} if fits and not torch.version.hip else {})
