"""Selection within registers: scores that carry their column in their last bits, sorted by exchanges of maximum and minimum.

A product of tensor cores leaves four threads with a row of a tile [BT, BN], each with two neighbouring columns of every eight. Each
of the BN / 4 planes [BT, 4] that the tile is split into is one register of them, so that exchanges between planes move nothing.
"""

import torch

from midus_hf.ops.dispatch.tiles import Changes, Tile
from midus_hf.ops.dispatch.triton import power_of_two, tl, triton
from midus_hf.ops.product_key.triton.exact import FEW_TOKENS

MOST_SUB_KEYS = 128
"""That fit a tile of one product, and a tag of 7 bits."""


MOST_RETRIEVED = 8
"""That are sorted with fewer instructions than are searched for."""


LOWEST = -3.4028234663852886e38
"""Of float32 that is finite: a tag makes no number of what is infinite."""


def packs(dtype: torch.dtype, n: int, k: int) -> bool:
    """Whether scores of so many sub-keys can carry their columns, and lose less by it than by the rounding of a query."""
    return dtype in (torch.bfloat16, torch.float16) and n <= MOST_SUB_KEYS and k <= MOST_RETRIEVED


@triton.jit
def tagged(values, tags, BITS: tl.constexpr):
    """Float32 `values` with a tag in place of their last BITS bits, which changes them by less than 2^(BITS - 23) of their size."""
    bits = values.to(tl.int32, bitcast=True) & (-1 << BITS)
    return (bits | tags).to(tl.float32, bitcast=True)


@triton.jit
def tag_of(values, BITS: tl.constexpr):
    """What `tagged` put into the values; anything of those that are not numbers."""
    return values.to(tl.int32, bitcast=True) & ((1 << BITS) - 1)


@triton.jit
def larger(first, second):
    """The maximum; no number if either is none, which must not get lost on the way to a loss."""
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(first, second):
    """The minimum, likewise."""
    return tl.minimum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def halves_of(planes, BT: tl.constexpr, BLOCKS: tl.constexpr):
    """Twice as many planes [BT, BLOCKS, 4] out of planes [BT, 2 * BLOCKS, 4]."""
    halves = ()
    for place in tl.static_range(len(planes)):
        halves = halves + tl.split(tl.permute(tl.reshape(planes[place], [BT, BLOCKS, 2, 4]), (0, 1, 3, 2)))
    return halves


@triton.jit
def planes_of(tile, BT: tl.constexpr, BN: tl.constexpr):
    """The columns of a tile [BT, BN], BN at most 128, as BN / 4 planes [BT, 4]."""
    planes = tl.split(tl.reshape(tile, [BT, BN // 8, 4, 2]))
    for step in tl.static_range(4):
        if BN // 16 >> step > 0:
            planes = halves_of(planes, BT, BN // 16 >> step)
    flat = ()
    for place in tl.static_range(len(planes)):
        flat = flat + (tl.reshape(planes[place], [BT, 4]),)
    return flat


@triton.jit
def exchanged(values, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The tuple with the larger of two of its members at FIRST and the smaller at SECOND, which lies behind it."""
    first, second = values[FIRST], values[SECOND]
    rest = values[:FIRST] + (larger(first, second),) + values[FIRST + 1 : SECOND] + (smaller(first, second),)
    return rest + values[SECOND + 1 :]


@triton.jit
def merged(values, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """A step of Batcher's odd-even merge of neighbouring descending stretches of SIZE members; strides halve from SIZE to 1."""
    for place in tl.static_range(len(values) - STRIDE):
        if STRIDE == SIZE:
            if place % (2 * SIZE) < SIZE:
                values = exchanged(values, place, place + STRIDE)
        elif (place % (2 * SIZE)) // STRIDE % 2 == 1 and place % (2 * SIZE) + STRIDE < 2 * SIZE:
            values = exchanged(values, place, place + STRIDE)
    return values


@triton.jit
def descending(values):
    """A tuple of 1, 2, 4 or 8 from the largest to the smallest, by 0, 1, 5 or 19 exchanges."""
    if len(values) > 1:
        values = merged(values, 1, 1)
    if len(values) > 2:
        values = merged(merged(values, 2, 2), 2, 1)
    if len(values) > 4:
        values = merged(merged(merged(values, 4, 4), 4, 2), 4, 1)
    return values


@triton.jit
def halved(values, STRIDE: tl.constexpr):
    """A step of sorting what first rises and then falls; strides halve to 1."""
    for place in tl.static_range(len(values) - STRIDE):
        if place // STRIDE % 2 == 0:
            values = exchanged(values, place, place + STRIDE)
    return values


@triton.jit
def best_of_two(values, others):
    """The larger half of two descending tuples of one length, 1, 2, 4 or 8, descending."""
    best = ()
    for place in tl.static_range(len(values)):
        best = best + (larger(values[place], others[len(values) - 1 - place]),)
    if len(values) > 4:
        best = halved(best, 4)
    if len(values) > 2:
        best = halved(best, 2)
    if len(values) > 1:
        best = halved(best, 1)
    return best


@triton.jit
def best_of_tile(tile, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr):
    """The KP largest of each row of `tagged` scores [BT, BN], descending: a tuple of [BT]; BN is 4 * KP at least.

    All are no numbers in rows that have a score which is none, as infinite ones become under a tag, unless it is 0.
    """
    planes = planes_of(tile, BT, BN)
    best = descending(planes[:KP])
    for group in tl.static_range(1, BN // 4 // KP):
        best = best_of_two(best, descending(planes[group * KP : (group + 1) * KP]))
    # A maximum over threads leaves out what is no number.
    spoiled = tl.sum(best[0] * 0.0, axis=1)
    found = ()
    for rank in tl.static_range(KP):
        top = tl.max(best[0], axis=1)
        found = found + (top + spoiled,)
        if rank + 1 < KP:
            taken = best[0] == top[:, None]
            rest = ()
            for place in tl.static_range(KP - 1 - rank):
                rest = rest + (tl.where(taken, best[place + 1], best[place]),)
            best = rest
    return found


@triton.jit
def best_pairs(row_values, column_values, K: tl.constexpr, RANK_BITS: tl.constexpr):
    """The K largest sums of two descending tuples of [BT], descending; all but the first, of ranks 0, are `tagged` with both ranks.

    Ranks i and j can be among them only if (i + 1)(j + 1) <= K, since so many pairs are at least as large.
    """
    sums = (row_values[0] + column_values[0],)
    for j in tl.static_range(1, K):
        sums = sums + (tagged(row_values[0] + column_values[j], j, 2 * RANK_BITS),)
    for i in tl.static_range(1, K):
        for j in tl.static_range(K // (i + 1)):
            added = tagged(row_values[i] + column_values[j], (i << RANK_BITS) | j, 2 * RANK_BITS)
            for place in tl.static_range((i + 1) * (j + 1) - 1, K):  # as many are at least as large
                kept = larger(sums[place], added)
                added = smaller(sums[place], added)
                sums = sums[:place] + (kept,) + sums[place + 1 :]
    return sums


@triton.jit
def columns_of(values, BITS: tl.constexpr, N: tl.constexpr):
    """The columns of a tuple of `tagged` scores, each below N, a byte each: words [BT] of four."""
    words = ()
    for place in tl.static_range(len(values)):
        column = tag_of(values[place], BITS)
        if N < 1 << BITS:
            column = tl.minimum(column, N - 1)  # of what is no number
        if place % 4 == 0:
            words = words + (column,)
        else:
            words = words[: place // 4] + (words[place // 4] | (column << (8 * (place % 4))),)
    return words


@triton.jit
def column_at(words, rank):
    """The byte of each token's rank out of what `columns_of` made of up to 8."""
    word = words[0]
    if len(words) == 2:
        word = tl.where(rank < 4, word, words[1])
    return (word >> ((rank & 3) * 8)) & 127


@triton.jit
def stacked(values):
    """A tuple of 1, 2, 4 or 8 tensors [BT] as one [BT, 1, 2, 4 or 8]."""
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
    """Half as many tensors, each joined with the one half of the tuple behind it."""
    joined = ()
    for place in tl.static_range(len(values) // 2):
        joined = joined + (tl.join(values[place], values[place + len(values) // 2]),)
    return joined


@triton.jit
def load_tile(pointers, mask, IS_WHOLE: tl.constexpr):
    """What is there, and zero where the mask says that nothing is; without a mask where all is."""
    if IS_WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_tile(pointers, tile, mask, IS_WHOLE: tl.constexpr):
    """Store a tile where the mask says, in the dtype of what is there; without a mask everywhere."""
    if IS_WHOLE:
        tl.store(pointers, tile.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def turned_keys(keys, N: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr):
    """The sub-keys [N, HALF] of one side of a head: [DP, BN]."""
    dims, columns = tl.arange(0, DP), tl.arange(0, BN)
    mask = (dims < HALF)[:, None] & (columns < N)[None, :]
    return load_tile(keys + columns[None, :] * HALF + dims[:, None], mask, DP == HALF and BN == N)


@triton.jit
def best_packed(
    query, keys, WIDE: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """The KP best scores of each query [BT, DP] with keys [DP, BN], `tagged` with their columns, descending: a tuple of [BT]."""
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
    """The K best slots of BT tokens from `first` on for one head, whose sub-keys [DP, BN] are at hand.

    Their scores, descending, as `best_pairs` leaves them, and then the slots: one tuple of 2 * K tensors [BT].
    """
    token, dims = tl.arange(0, BT), tl.arange(0, DP)
    asked = query + (first * token_stride + head * head_stride) + (token[:, None] * token_stride + dims[None, :])
    dim_mask = valid[:, None] & (dims < HALF)[None, :]
    row_query = load_tile(asked, dim_mask, IS_EVEN and DP == HALF)
    column_query = load_tile(asked + HALF, dim_mask, IS_EVEN and DP == HALF)
    row_values = best_packed(row_query, rows_of_head, WIDE, N, BITS, KP, BT, BN, LOWEST)
    column_values = best_packed(column_query, columns_of_head, WIDE, N, BITS, KP, BT, BN, LOWEST)
    found = best_pairs(row_values, column_values, K, RANK_BITS)
    rows, columns = columns_of(row_values, BITS, N), columns_of(column_values, BITS, N)
    for rank in tl.static_range(K):
        pair = tag_of(found[rank], 2 * RANK_BITS) if rank > 0 else 0
        found = found + (column_at(rows, pair >> RANK_BITS) * N + column_at(columns, pair & (KP - 1)),)
    return found


def packed_tile(changes: Changes, n: int, k: int, half: int, few: bool, lanes: int = 1) -> Tile:
    """Sizes of a program that selects, of at most about 8,192 elements in its widest tile, also of `lanes` columns.

    For the few tokens of a decoding step it has few warps.
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
