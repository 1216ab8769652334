"""Selection of product keys in kernels, without storing the scores of all sub-keys.

Sizes: S tokens, H heads; `BT` tokens per program, `BN` sub-keys per stretch; `KP`, `DP` and `VP` the powers of two at
or above k, d / 2 and v.
"""

import functools

import torch

from midus_hf.ops.dispatch.triton import (
    Tile,
    interprets_kernels,
    on_device_of,
    power_of_two,
    quotient_above,
    tl,
    triton,
)

# Heads whose programs run together: their inputs for a token are adjacent in memory, and gathered rows stay in cache.
HEADS_TOGETHER = 8


# Most bytes of sub-keys and queries that a program multiplies: every GPU that kernels run on has this much shared
# memory.
_MOST_SHARED_BYTES = 96 * 1024

# Most float32 sub-keys per side: with more, a program goes through stretches and spills some ten thousand bytes per
# thread.
_MOST_WIDE_SUB_KEYS = 128

# Fewest rows of a matrix product, and so the rows that are computed for the few tokens of a decoding step.
FEW_TOKENS = 16


@triton.jit
def token_block_and_head(tokens, heads, BT, TOGETHER: tl.constexpr):
    """Return the block of BT tokens and the head of this program; programs go through the heads group after group."""
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
    """Return the K largest of each row of `scores` [BT, BN], descending, and their columns, counted from `start`: [BT, KP] each.

    Among equal scores, the first comes first. Ranks K to KP - 1 hold minus infinity and column 0. Columns stay below n
    even if scores are NaN.
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
    """Return the K largest of two descending lists, [BT, KP] each, and their columns; among equals, the first list's come first."""
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
    """Return the remaining pair with the largest sum, and the state after removing it.

    Columns descend, so for each row rank only the best column that is not yet paired with it can come next:
    `next_column` [BT, KP], with sums `sums` [BT, KP]. K calls merge K descending lists, which gives the K best of all
    pairs.

    Returns:
        The sum [BT], the ranks of its row and column [BT], then the new `sums` and `next_column`.
    """
    ranks = tl.arange(0, KP)
    score, row_rank = tl.max(sums, axis=1, return_indices=True)
    column_rank = pick(next_column, row_rank, KP)
    following = tl.where(column_rank + 1 < K, pick(column_values, column_rank + 1, KP), float("-inf"))
    following += pick(row_values, row_rank, KP)
    here = ranks[None, :] == row_rank[:, None]
    return score, row_rank, column_rank, tl.where(here, following[:, None], sums), next_column + here.to(tl.int32)


@triton.jit
def first_sums(row_values, column_values, KP: tl.constexpr, BT: tl.constexpr):
    """Return the first `sums` and `next_column` of `next_pair`: every row rank with the best column."""
    best = pick(column_values, tl.zeros([BT], tl.int32), KP)
    return row_values + best[:, None], tl.zeros([BT, KP], tl.int32)


def select_tile(n: int, k: int) -> Tile:
    """Return the sizes of a program: at most 128 sub-keys at a time, and 16 to 64 tokens with about 4,096 scores in all."""
    stretch = min(128, max(16, power_of_two(n)))
    ranks = power_of_two(k)
    return {"ONE": n <= stretch, "KP": ranks, "BT": max(16, min(64, 4096 // max(stretch, ranks))), "BN": stretch}


@triton.jit
def best_of_key_stretch(
    query, keys, n, half, start, WIDE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Return scores and numbers of the K best sub-keys per query [BT, DP], out of keys `start` to `start + BN` of [n, half]."""
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
    """Return scores and numbers of the K best sub-keys per query [BT, DP], out of keys [n, half], a stretch of BN at a time."""
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
    """Return the scores of the K best slots per token for one head, descending, then minus infinity; and the slots: [BT, KP] each."""
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
    sums, next_column = first_sums(row_values, column_values, KP, BT)
    scores = tl.full([BT, KP], float("-inf"), tl.float32)
    chosen = tl.zeros([BT, KP], tl.int32)
    for rank in range(K):
        score, i, j, sums, next_column = next_pair(sums, next_column, row_values, column_values, K, KP)
        slot = pick(rows, i, KP) * n + pick(columns, j, KP)
        scores = tl.where(ranks[None, :] == rank, score[:, None], scores)
        chosen = tl.where(ranks[None, :] == rank, slot[:, None], chosen)
    return scores, chosen


def selection_tile(n: int, k: int, half: int, few: bool, is_wide: bool, lanes: int = 1) -> Tile:
    """Return the sizes of a program that selects: its widest tile, also one of `lanes` columns, has about 8,192 elements at most."""
    tile, dims = select_tile(n, k), max(16, power_of_two(half))
    tile |= {"BT": max(16, min(tile["BT"], 8192 // max(dims, lanes))), "DP": dims, "num_warps": 4}
    return tile | (_tile_of_few(tile["BN"], is_wide) if few else {})


def _tile_of_few(stretch: int, is_wide: bool) -> Tile:
    """Return the sizes that replace others in decoding: as few rows as a product takes, and as few warps as hold them in registers.

    Compiled for compute capability 9.0, two warps need no more than 168 registers per thread, but spill some hundreds
    of bytes if products of float32 have more than 64 sub-keys at a time.
    """
    return {"BT": FEW_TOKENS, "num_warps": 4 if is_wide and stretch > 64 else 2}


def wide_products(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """Return whether products are computed in float32: for float32 queries, for two different dtypes, and in the interpreter."""
    return query.dtype == torch.float32 or query.dtype != keys.dtype or interprets_kernels()


_tile = functools.cache(selection_tile)


def scores_refusal(dtype: torch.dtype, n: int, k: int, half: int) -> str | None:
    """Return why these kernels do not support these sizes, and which they expect; None if they do."""
    if dtype == torch.float32 and n > _MOST_WIDE_SUB_KEYS:
        return f"{n} sub-keys per side are float32; expected {_MOST_WIDE_SUB_KEYS} or fewer, or half precision"
    tile = selection_tile(n, k, half, False, dtype == torch.float32)
    held = (tile["BN"] + tile["BT"]) * tile["DP"] * dtype.itemsize
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


def triton_scores(
    query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores, float32, descending, and slots, int64, `[S, H, k]` each, of the best slots for a query `[S, H, d]`."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    row_keys, column_keys = row_keys.contiguous(), column_keys.contiguous()
    (tokens, heads, _), (_, n, half) = query.shape, row_keys.shape
    scores = query.new_empty(tokens, heads, k, dtype=torch.float32)
    slots = query.new_empty(tokens, heads, k, dtype=torch.int64)
    if tokens:
        is_wide = wide_products(query, row_keys)
        tile = _tile(n, k, half, tokens <= FEW_TOKENS, is_wide)
        with on_device_of(query):
            scores_kernel[(quotient_above(tokens, tile["BT"]) * heads,)](
                query, row_keys, column_keys, scores, slots, tokens, heads, n, half, query.stride(0), query.stride(1),
                WIDE=is_wide, TOGETHER=HEADS_TOGETHER, K=k, **tile,
            )  # fmt: skip
    return scores, slots
