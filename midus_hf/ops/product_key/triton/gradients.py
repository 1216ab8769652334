"""The kernel of the gradients of queries and of sub-keys, through the scores of head-wise lookup.

The gradients of a token's scores are spread over a tile, each at the column of its sub-key. Tensor cores multiply the
tile with sub-keys for the gradient of the queries, and with queries for the gradient of the sub-keys, which a program
sums over many tokens. For bfloat16, the tile is rounded to bfloat16 before, as the resulting gradients are afterwards.

Sizes: S tokens, H heads; `BT` tokens at a time; `BN` sub-keys per stretch; `KP`, `DP` and `VP` the powers of two at or
above k, d / 2 and v.
"""

import functools

import torch

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

# Most programs: they fill a GPU's multiprocessors several times. Each has separate sums for sub-keys, which are read
# back.
_PROGRAMS = 1024


# Most elements of all these sums together: 256 MB.
_MOST_SUMS = 1 << 26


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
    """Return the gradients of the scores of a block of tokens, through the softmax, and their slots: [BT, KP] each."""
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
    """Load the gradients of the scores of a block of tokens from [S, H, K], and their slots: [BT, KP] each."""
    ranks = tl.arange(0, KP)
    entries = first * K + (tl.arange(0, BT)[:, None] * (HEADS * K) + ranks[None, :])
    rank_mask = valid[:, None] & (ranks < K)[None, :]
    chosen = tl.load(slots + entries, mask=rank_mask, other=0).to(tl.int32)
    return tl.load(gradient + entries, mask=rank_mask, other=0.0).to(tl.float32), chosen


@triton.jit
def spread_scores(scores, chosen, start, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr):
    """Return scores [BT, KP] at the columns of their sub-keys, for BN sub-keys from `start` on: [BT, BN].

    Scores of the same sub-key are added.
    """
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
    """Load sub-keys `start` to `start + BN` of [N, HALF]: [BN, DP]."""
    indices, dims = start + tl.arange(0, BN), tl.arange(0, DP)
    mask = (indices < N)[:, None] & (dims < HALF)[None, :]
    return tl.load(keys + indices[:, None] * HALF + dims[None, :], mask=mask, other=0.0)


@triton.jit
def add_to_keys(
    total, into_keys, start, ADDS: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Write gradients [BN, DP] of sub-keys `start` to `start + BN`; if ADDS, add the numbers that this program wrote before."""
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
    """Store the gradient of one half of the queries, and sum the gradients of the sub-keys of this side.

    The sum is in `total`, which is returned, if ONE stretch has all sub-keys, else in memory.
    """
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
    """Write gradients of the query [S, H, 2 * HALF], and of the sub-keys per split of the tokens [splits, 2, H, N, HALF], float32.

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
    gradient: torch.Tensor,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, row keys and column keys for a gradient `[S, H, v]` of a lookup that kept slots and weights."""
    slots, weights = kept
    return _gradients(gradient, query, row_keys, column_keys, slots, (bank.contiguous(), weights))


def triton_gradients_of_scores(
    gradient: torch.Tensor,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, row keys and column keys for a gradient `[S, H, k]` of the scores of slots `[S, H, k]`."""
    return _gradients(gradient, query, row_keys, column_keys, slots, None)


def _gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    slots: torch.Tensor,
    looked_up: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, row keys and column keys.

    `gradient` is the gradient of a lookup if `looked_up` has the lookup's bank and weights, else of scores.
    """
    query = query if query.stride(-1) == 1 else query.contiguous()
    gradient, row_keys, column_keys = gradient.contiguous(), row_keys.contiguous(), column_keys.contiguous()
    (tokens, heads, k), (_, n, half) = slots.shape, row_keys.shape
    if not tokens:
        return torch.zeros_like(query), torch.zeros_like(row_keys), torch.zeros_like(column_keys)
    bank, weights = looked_up or (gradient, gradient)  # stand-ins that are not read
    width = bank.shape[-1] if looked_up else 1
    into_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    tile = _tile(n, k, half, width, query.dtype == torch.float32)
    blocks = quotient_above(tokens, tile["BT"])
    splits_at_most = max(1, min(_PROGRAMS // heads, _MOST_SUMS // (2 * heads * n * half)))
    blocks_a_split = quotient_above(blocks, splits_at_most)
    splits = quotient_above(blocks, blocks_a_split)
    allocate = torch.empty if tile["ONE"] else torch.zeros
    partial = allocate(splits, 2, heads, n, half, dtype=torch.float32, device=query.device)
    with on_device_of(query):
        score_gradient_kernel[(heads * splits,)](
            gradient, query, row_keys, column_keys, bank, slots, weights, into_query, partial,
            tokens, query.stride(0), query.stride(1), blocks_a_split,
            OF_LOOKUP=looked_up is not None, HEADS=heads, N=n, HALF=half, WIDTH=width,
            HAS_OWN_BANKS=looked_up is not None and bank.dim() == 3, PRECISION=_precision(query), K=k, **tile,
        )  # fmt: skip
    into_row_keys, into_column_keys = (partial[:, side].sum(0).to(row_keys.dtype) for side in (0, 1))
    return into_query, into_row_keys, into_column_keys


def _precision(query: torch.Tensor) -> str | None:
    """Return the precision with which `product` multiplies gradients of scores.

    For float16 this is TF32: gradients may leave the small range of float16, but not the range of TF32.
    """
    if query.dtype == torch.float32 or interprets_kernels():
        return precise_product()
    return wide_ranged_product() if query.dtype == torch.float16 else None


@functools.cache
def _tile(n: int, k: int, half: int, width: int, is_wide: bool) -> Tile:
    """Return the sizes of a program, whose widest tile has about 8,192 elements at most.

    For half precision and heads of width 64 or less, registers are limited to 168 per thread: three programs instead of
    two then fit a multiprocessor on NVIDIA, at the cost of 16 spilled bytes.
    """
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
