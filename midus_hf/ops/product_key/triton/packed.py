"""Selection within registers: scores that carry their column in their last bits, sorted by exchanges of maximum and minimum.

After a product on tensor cores, four threads hold a row of a tile [BT, BN]; each thread has two neighbouring columns of
every eight. The tile is split into BN / 4 planes [BT, 4]. A plane is one register of each thread, so exchanges between
planes move no data.
"""

import torch

from midus_hf.ops.dispatch.tiles import Changes, Tile
from midus_hf.ops.dispatch.triton import power_of_two, tl, triton
from midus_hf.ops.product_key.triton.exact import FEW_TOKENS

# Most sub-keys per side: they fit a tile of one product, and a tag of 7 bits.
MOST_SUB_KEYS = 128


# Most slots per head for which sorting takes fewer instructions than searching.
MOST_RETRIEVED = 8


# Lowest finite number of float32: a tag would turn minus infinity into NaN.
LOWEST = -3.4028234663852886e38


def packs(dtype: torch.dtype, n: int, k: int) -> bool:
    """Return whether scores of n sub-keys can carry their columns, and lose less by it than by the rounding of a query."""
    return dtype in (torch.bfloat16, torch.float16) and n <= MOST_SUB_KEYS and k <= MOST_RETRIEVED


@triton.jit
def tagged(values, tags, BITS: tl.constexpr):
    """Return float32 `values` with tags in their last BITS bits, which changes values by less than 2^(BITS - 23) of their size."""
    bits = values.to(tl.int32, bitcast=True) & (-1 << BITS)
    return (bits | tags).to(tl.float32, bitcast=True)


@triton.jit
def tag_of(values, BITS: tl.constexpr):
    """Return the tags that `tagged` put into values; any number for NaN."""
    return values.to(tl.int32, bitcast=True) & ((1 << BITS) - 1)


@triton.jit
def larger(first, second):
    """Return the maximum, or NaN if either is NaN: a NaN must stay visible in the loss."""
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(first, second):
    """Return the minimum, or NaN if either is NaN."""
    return tl.minimum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def halves_of(planes, BT: tl.constexpr, BLOCKS: tl.constexpr):
    """Split planes [BT, 2 * BLOCKS, 4] into twice as many planes [BT, BLOCKS, 4]."""
    halves = ()
    for index in tl.static_range(len(planes)):
        halves = halves + tl.split(tl.permute(tl.reshape(planes[index], [BT, BLOCKS, 2, 4]), (0, 1, 3, 2)))
    return halves


@triton.jit
def planes_of(tile, BT: tl.constexpr, BN: tl.constexpr):
    """Split the columns of a tile [BT, BN], BN at most 128, into BN / 4 planes [BT, 4]."""
    planes = tl.split(tl.reshape(tile, [BT, BN // 8, 4, 2]))
    for step in tl.static_range(4):
        if BN // 16 >> step > 0:
            planes = halves_of(planes, BT, BN // 16 >> step)
    flat = ()
    for index in tl.static_range(len(planes)):
        flat = flat + (tl.reshape(planes[index], [BT, 4]),)
    return flat


@triton.jit
def exchanged(values, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return the tuple with the larger of its members FIRST and SECOND at FIRST and the smaller at SECOND; FIRST < SECOND."""
    first, second = values[FIRST], values[SECOND]
    rest = values[:FIRST] + (larger(first, second),) + values[FIRST + 1 : SECOND] + (smaller(first, second),)
    return rest + values[SECOND + 1 :]


@triton.jit
def merged(values, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Apply a step of Batcher's odd-even merge to neighbouring descending stretches of SIZE members.

    From step to step, STRIDE halves from SIZE to 1.
    """
    for index in tl.static_range(len(values) - STRIDE):
        if STRIDE == SIZE:
            if index % (2 * SIZE) < SIZE:
                values = exchanged(values, index, index + STRIDE)
        elif (index % (2 * SIZE)) // STRIDE % 2 == 1 and index % (2 * SIZE) + STRIDE < 2 * SIZE:
            values = exchanged(values, index, index + STRIDE)
    return values


@triton.jit
def descending(values):
    """Sort a tuple of 1, 2, 4 or 8 members from the largest to the smallest, by 0, 1, 5 or 19 exchanges."""
    if len(values) > 1:
        values = merged(values, 1, 1)
    if len(values) > 2:
        values = merged(merged(values, 2, 2), 2, 1)
    if len(values) > 4:
        values = merged(merged(merged(values, 4, 4), 4, 2), 4, 1)
    return values


@triton.jit
def halved(values, STRIDE: tl.constexpr):
    """Apply a step of sorting a tuple that first rises and then falls; from step to step, STRIDE halves to 1."""
    for index in tl.static_range(len(values) - STRIDE):
        if index // STRIDE % 2 == 0:
            values = exchanged(values, index, index + STRIDE)
    return values


@triton.jit
def best_of_two(values, others):
    """Return the larger half of the members of two descending tuples of equal length 1, 2, 4 or 8, descending."""
    best = ()
    for index in tl.static_range(len(values)):
        best = best + (larger(values[index], others[len(values) - 1 - index]),)
    if len(values) > 4:
        best = halved(best, 4)
    if len(values) > 2:
        best = halved(best, 2)
    if len(values) > 1:
        best = halved(best, 1)
    return best


@triton.jit
def best_of_tile(tile, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr):
    """Return the KP largest of each row of `tagged` scores [BT, BN], descending: a tuple of [BT]; BN is 4 * KP at least.

    If a score of a row is NaN, all results of the row are NaN. `tagged` turns infinite scores into NaN, unless their
    tag is 0.
    """
    planes = planes_of(tile, BT, BN)
    best = descending(planes[:KP])
    for group in tl.static_range(1, BN // 4 // KP):
        best = best_of_two(best, descending(planes[group * KP : (group + 1) * KP]))
    # The maximum over threads ignores NaN.
    spoiled = tl.sum(best[0] * 0.0, axis=1)
    tops = ()
    for rank in tl.static_range(KP):
        top = tl.max(best[0], axis=1)
        tops = tops + (top + spoiled,)
        if rank + 1 < KP:
            taken = best[0] == top[:, None]
            rest = ()
            for index in tl.static_range(KP - 1 - rank):
                rest = rest + (tl.where(taken, best[index + 1], best[index]),)
            best = rest
    return tops


@triton.jit
def best_pairs(row_values, column_values, K: tl.constexpr, RANK_BITS: tl.constexpr):
    """Return the K largest sums of two descending tuples of [BT], descending; all but the first are `tagged` with both ranks.

    The first sum is of ranks 0. Ranks i and j can be among the K largest only if (i + 1)(j + 1) <= K: that many sums
    are at least as large.
    """
    sums = (row_values[0] + column_values[0],)
    for j in tl.static_range(1, K):
        sums = sums + (tagged(row_values[0] + column_values[j], j, 2 * RANK_BITS),)
    for i in tl.static_range(1, K):
        for j in tl.static_range(K // (i + 1)):
            added = tagged(row_values[i] + column_values[j], (i << RANK_BITS) | j, 2 * RANK_BITS)
            for index in tl.static_range((i + 1) * (j + 1) - 1, K):  # that many sums are at least as large
                kept = larger(sums[index], added)
                added = smaller(sums[index], added)
                sums = sums[:index] + (kept,) + sums[index + 1 :]
    return sums


@triton.jit
def columns_of(values, BITS: tl.constexpr, N: tl.constexpr):
    """Return the columns of a tuple of `tagged` scores, each below N, packed into integers [BT] of four bytes, a byte per column."""
    packed_columns = ()
    for index in tl.static_range(len(values)):
        column = tag_of(values[index], BITS)
        if N < 1 << BITS:
            column = tl.minimum(column, N - 1)  # for NaN
        if index % 4 == 0:
            packed_columns = packed_columns + (column,)
        else:
            packed_columns = packed_columns[: index // 4] + (
                packed_columns[index // 4] | (column << (8 * (index % 4))),
            )
    return packed_columns


@triton.jit
def column_at(packed_columns, rank):
    """Return the column of each token's rank from up to 8 columns that `columns_of` packed."""
    word = packed_columns[0]
    if len(packed_columns) == 2:
        word = tl.where(rank < 4, word, packed_columns[1])
    return (word >> ((rank & 3) * 8)) & 127


@triton.jit
def stacked(values):
    """Stack a tuple of 1, 2, 4 or 8 tensors [BT] into one tensor [BT, 1, 2, 4 or 8]."""
    if len(values) == 1:
        return values[0][:, None]
    else:
        joined = joined_halves(values)
        if len(joined) > 1:
            joined = joined_halves(joined)
        if len(joined) > 1:
            joined = joined_halves(joined)
        return tl.reshape(joined[0], [values[0].shape[0], len(values)])


@triton.jit
def joined_halves(values):
    """Join each tensor of the first half of a tuple with its counterpart of the second half."""
    joined = ()
    for index in tl.static_range(len(values) // 2):
        joined = joined + (tl.join(values[index], values[index + len(values) // 2]),)
    return joined


@triton.jit
def load_tile(pointers, mask, IS_WHOLE: tl.constexpr):
    """Load a tile, with 0 outside the mask; without a mask if IS_WHOLE."""
    if IS_WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_tile(pointers, tile, mask, IS_WHOLE: tl.constexpr):
    """Store a tile within the mask, in the dtype of the pointers; without a mask if IS_WHOLE."""
    if IS_WHOLE:
        tl.store(pointers, tile.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def turned_keys(keys, N: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr):
    """Load the sub-keys [N, HALF] of one side of a head, transposed to [DP, BN]."""
    dims, columns = tl.arange(0, DP), tl.arange(0, BN)
    mask = (dims < HALF)[:, None] & (columns < N)[None, :]
    return load_tile(keys + columns[None, :] * HALF + dims[:, None], mask, DP == HALF and BN == N)


@triton.jit
def best_packed(
    query, keys, WIDE: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Return the KP best scores of each query [BT, DP] with keys [DP, BN], `tagged` with columns, descending: a tuple of [BT]."""
    columns = tl.arange(0, BN)
    if WIDE:
        scores = tl.dot(query.to(tl.float32), keys.to(tl.float32), input_precision="ieee")
    else:
        scores = tl.dot(query, keys)
    if BN > N:
        scores = tl.where((columns < N)[None, :], scores, LOWEST)
    return best_of_tile(tagged(scores, columns[None, :], BITS), KP, BT, BN)


@triton.jit
def best_slots_of_block(
    query, rows_of_head, columns_of_head, first, head, valid, token_stride, head_stride,
    N: tl.constexpr, HALF: tl.constexpr, IS_EVEN: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr,
    RANK_BITS: tl.constexpr, LOWEST: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Return scores and slots of the K best slots of BT tokens from `first` on, for one head with loaded sub-keys [DP, BN].

    The result is one tuple of 2 * K tensors [BT]: first the scores, descending, from `best_pairs`, then the slots.
    """
    token, dims = tl.arange(0, BT), tl.arange(0, DP)
    query_pointers = (
        query + (first * token_stride + head * head_stride) + (token[:, None] * token_stride + dims[None, :])
    )
    dim_mask = valid[:, None] & (dims < HALF)[None, :]
    row_query = load_tile(query_pointers, dim_mask, IS_EVEN and DP == HALF)
    column_query = load_tile(query_pointers + HALF, dim_mask, IS_EVEN and DP == HALF)
    row_values = best_packed(row_query, rows_of_head, WIDE, N, BITS, KP, BT, BN, LOWEST)
    column_values = best_packed(column_query, columns_of_head, WIDE, N, BITS, KP, BT, BN, LOWEST)
    best = best_pairs(row_values, column_values, K, RANK_BITS)
    rows, columns = columns_of(row_values, BITS, N), columns_of(column_values, BITS, N)
    for rank in tl.static_range(K):
        pair = tag_of(best[rank], 2 * RANK_BITS) if rank > 0 else 0
        best = best + (column_at(rows, pair >> RANK_BITS) * N + column_at(columns, pair & (KP - 1)),)
    return best


def packed_tile(changes: Changes, n: int, k: int, half: int, few: bool, lanes: int = 1) -> Tile:
    """Return the sizes of a program that selects: its widest tile, also one of `lanes` columns, has about 8,192 elements at most.

    For the few tokens of a decoding step, the program has few warps.
    """
    ranks = power_of_two(k)
    columns = max(16, power_of_two(n), 4 * ranks)
    dims = max(16, power_of_two(half))
    return {
        "BITS": (columns - 1).bit_length(),
        "RANK_BITS": (ranks - 1).bit_length(),
        "KP": ranks,
        "BT": FEW_TOKENS if few else max(16, min(64, 8192 // max(dims, lanes))),
        "BN": columns,
        "DP": dims,
        "num_warps": 2 if few else 4,
        **changes,
    }
