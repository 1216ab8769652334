"""How kernels select product keys by all bits of their scores.

Shapes: `BT` tokens per program, `BN` sub-keys per stretch, `KP` the power of two at or above k.
"""

from midus_hf.ops.tiles import Tile
from midus_hf.ops.triton_import import tl, triton
from midus_hf.ops.triton_launch import power_of_two


@triton.jit
def pick(values, places, KP: tl.constexpr):
    """`values[t, places[t]]` of [BT, KP]; zero where the place lies outside."""
    ranks = tl.arange(0, KP)
    return tl.sum(tl.where(ranks[None, :] == places[:, None], values, 0), axis=1)


@triton.jit
def best_columns(scores, start, n, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr):
    """The K largest of each row of `scores` [BT, BN], descending, and their columns, counted from `start`.

    Among equals the first. Places K to KP - 1 hold minus infinity and column 0. Columns stay below n also where scores are NaN.
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
    """The K largest of two descending lists [BT, KP] each, of which the first goes first among equals."""
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
    """The pair of largest sum that is left, and what is left after it.

    Columns descend, so of each row rank only the best column not yet paired with it can be next: `next_column`
    [BT, KP], whose sums are `sums` [BT, KP]. K calls merge K descending lists, which gives the K best of all pairs.

    Returns:
        The sum [BT], ranks of its row and column [BT], then `sums` and `next_column` after it.
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
    """What `next_pair` starts from: every row rank with the best column."""
    best = pick(column_values, tl.zeros([BT], tl.int32), KP)
    return row_values + best[:, None], tl.zeros([BT, KP], tl.int32)


def select_tile(n: int, k: int) -> Tile:
    """Sizes of a program: at most 128 sub-keys at a time, and about 8,192 elements of the widest tile."""
    stretch = min(128, max(16, power_of_two(n)))
    ranks = power_of_two(k)
    return {"ONE": n <= stretch, "KP": ranks, "BT": max(16, min(64, 4096 // max(stretch, ranks))), "BN": stretch}
