"""Selection of the best product keys by PyTorch's operations, and gradients through the selected scores."""

import functools

import torch

from midus_hf.ops.dispatch.precision import without_autocast

_FEW_ELEMENTS = 1 << 15
_FEW_COLUMNS = 24


def largest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `scores.topk(k, dim=-1)`, computed by groups on a CPU, where `topk` takes three times as long for 64 columns as for 16.

    The k largest scores of a row lie in the k groups with the largest maxima, so two selections among few scores give
    exactly the result of one selection among all. Among equal scores, any may be chosen.

    Args:
        scores: `[..., n]`, without NaN.
        k: Number of scores to select, `1 <= k <= n`.

    Returns:
        Values, descending, and indices, int64, both `[..., k]`.
    """
    n = scores.shape[-1]
    size = _group_size(n, k)
    if scores.device.type != "cpu" or size == 1 or scores.numel() < _FEW_ELEMENTS:
        return scores.topk(k, dim=-1)
    groups = -(-n // size)
    if size * groups > n:
        scores = torch.nn.functional.pad(scores, (0, size * groups - n), value=-torch.inf)
    maxima = functools.reduce(torch.maximum, scores.split(groups, dim=-1))  # group g holds g, g + groups, ...
    best = maxima.topk(k, dim=-1).indices  # [..., k]
    members = scores.unflatten(-1, (size, groups)).gather(-1, best.unsqueeze(-2).expand(*best.shape[:-1], size, k))
    values, places = members.flatten(-2).topk(k, dim=-1)
    return values, (places // k) * groups + best.gather(-1, places % k)


def _group_size(n: int, k: int) -> int:
    """Return the group size, a power of two, that leaves the fewest columns to select among; 1 if grouping saves little."""
    best, fewest = 1, n
    size = 2
    while n > _FEW_COLUMNS and size < n and -(-n // size) >= k:
        left = -(-n // size) + size * k
        if left < fewest:
            best, fewest = size, left
        size *= 2
    return best if fewest <= 0.75 * n else 1


def select(row_scores: torch.Tensor, column_scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and columns of the k best slots, best first, `[..., k]` each, int64, for scores `[..., n]` of rows and columns."""
    row_best, rows = largest(row_scores, k)
    column_best, columns = largest(column_scores, k)
    # A sum of ranks i and j can be among the k best only if (i + 1)(j + 1) <= k: that many sums are at least as large.
    steps = [(slice(i, i + 1), slice(0, k // (i + 1))) for i in range(k)]
    sums = torch.cat([row_best[..., i] + column_best[..., j] for i, j in steps], dim=-1)
    best = sums.topk(k, dim=-1).indices
    rows_of_sums = torch.cat([rows[..., i].expand(*rows.shape[:-1], j.stop) for i, j in steps], dim=-1)
    columns_of_sums = torch.cat([columns[..., j] for _, j in steps], dim=-1)
    return rows_of_sums.gather(-1, best), columns_of_sums.gather(-1, best)


def halves(query: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and column halves of a query `[S, H, d]`: `[H, S, d / 2]` each.

    Each half is copied: the rounding of a matrix product of strided rows depends on their layout in memory.
    """
    rows, columns = query.unflatten(-1, (2, -1)).permute(2, 1, 0, 3).to(dtype).contiguous()
    return rows, columns


def query_and_key_gradients(
    into_scores: torch.Tensor,
    slots: torch.Tensor,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query `[S, H, d]`, row keys and column keys `[H, n, d / 2]`, in their dtypes.

    Args:
        into_scores: Gradient of the scores of the chosen slots, `[H, S, k]`, float32 at least.
        slots: Chosen slots, `[H, S, k]`, int64.
        query: `[S, H, d]`.
        row_keys: `[H, n, d / 2]`.
        column_keys: `[H, n, d / 2]`.
    """
    n, wide = row_keys.shape[1], into_scores.dtype
    into_query, into_keys = [], []
    for keys, chosen, queries in zip(
        (row_keys, column_keys), (slots // n, slots % n), halves(query, wide), strict=True
    ):
        spread = into_scores.new_zeros(*into_scores.shape[:2], n).scatter_add_(-1, chosen, into_scores)  # [H, S, n]
        with without_autocast(query.device.type):
            into_query.append(torch.bmm(spread, keys.to(wide)))  # [H, S, d / 2]
            into_keys.append(torch.bmm(spread.transpose(1, 2), queries).to(keys.dtype))  # [H, n, d / 2]
    return torch.cat(into_query, dim=-1).transpose(0, 1).to(query.dtype).contiguous(), into_keys[0], into_keys[1]
