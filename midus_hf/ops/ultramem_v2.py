"""Tucker-decomposed query-key retrieval (TDQKR): the k best pairs of keys, scored by a small core."""

import torch
from torch import Tensor

from midus_hf.ops.product_key.op import largest

_MAX_SCORES = 1 << 24  # largest number of scores of pairs that are held at a time: 64 MB in float32


def tucker_topk(
    row_scores: Tensor,
    column_scores: Tensor,
    core: Tensor,
    row_vector: Tensor,
    column_vector: Tensor,
    k: int,
    side: int,
) -> tuple[Tensor, Tensor]:
    """Find, for every head, k pairs of keys with large scores (UltraMemV2, equations 6, 7, 10 and 11).

    The pair of row i and column j has the score `row_scores[i] @ core @ column_scores[j]`. The first stage approximates each core by
    its leading singular value, and keeps the `side` rows and the `side` columns with the largest leading scores, `row_scores @
    row_vector` and `column_scores @ column_vector`. The second stage scores all pairs of these exactly. They are the k best of all
    pairs if cores have rank 1, `side >= k` and all leading scores are positive.

    Args:
        row_scores: Scores of the row keys of each rank, `[..., H, n, r]`, floating point.
        column_scores: Scores of the column keys of each rank, `[..., H, n, r]`.
        core: Core of each head, `[H, r, r]`.
        row_vector: Leading left singular vector of each core, `[H, r]`.
        column_vector: Leading right singular vector of each core, `[H, r]`.
        k: Slots retrieved per head, `1 <= k <= side * side`.
        side: Rows, and columns, that the first stage keeps, `1 <= side <= n`.

    Returns:
        Scores `[..., H, k]`, descending, in their dtype, and slots `[..., H, k]`, int64: slot `i * n + j` is row i with column j.

    Raises:
        ValueError: If shapes disagree, or `k` or `side` lie outside their range.
    """
    if row_scores.dim() < 4 or row_scores.shape != column_scores.shape:
        raise ValueError(
            f"row_scores is {tuple(row_scores.shape)} and column_scores {tuple(column_scores.shape)}; expected equal shapes "
            "[..., heads, keys, rank]."
        )
    heads, n, rank = row_scores.shape[-3:]
    for name, tensor, shape in (
        ("core", core, (heads, rank, rank)),
        ("row_vector", row_vector, (heads, rank)),
        ("column_vector", column_vector, (heads, rank)),
    ):
        if tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; expected {shape}, as the scores have heads and rank.")
    if not 1 <= side <= n:
        raise ValueError(f"side is {side}; expected 1 <= side <= n = {n}.")
    if not 1 <= k <= side**2:
        raise ValueError(f"k is {k}; expected 1 <= k <= {side**2}, the pairs that the first stage keeps.")
    leading = row_scores.shape[:-3]
    rows, columns = row_scores.flatten(0, -4), column_scores.flatten(0, -4)  # [S, H, n, r]
    core = core.to(rows.dtype)
    with torch.no_grad():
        slots = select(rows, columns, core, row_vector.to(rows.dtype), column_vector.to(rows.dtype), k, side)
    scores = slot_scores(rows, columns, core, slots)
    return scores.unflatten(0, leading), slots.unflatten(0, leading)


def select(
    rows: Tensor, columns: Tensor, core: Tensor, row_vector: Tensor, column_vector: Tensor, k: int, side: int
) -> Tensor:
    """Return the chosen slots `[S, H, k]`, best first; arguments as in `tucker_topk`, one batch dimension."""
    stretch = max(1, _MAX_SCORES // (rows.shape[1] * side**2))
    if rows.shape[0] > stretch:  # `len` would fix the sizes of a traced graph
        parts = zip(rows.split(stretch), columns.split(stretch), strict=True)
        return torch.cat([select(*part, core, row_vector, column_vector, k, side) for part in parts])
    row_leading = torch.einsum("shnr,hr->shn", rows, row_vector)
    column_leading = torch.einsum("shnr,hr->shn", columns, column_vector)
    best_rows, best_columns = largest(row_leading, side)[1], largest(column_leading, side)[1]  # [S, H, side]
    grid = (scores_of_keys(rows, best_rows) @ core) @ scores_of_keys(columns, best_columns).transpose(-1, -2)
    pairs = grid.flatten(2).topk(k, dim=-1).indices  # [S, H, k] out of [S, H, side * side]
    return best_rows.gather(-1, pairs // side) * rows.shape[-2] + best_columns.gather(-1, pairs % side)


def slot_scores(rows: Tensor, columns: Tensor, core: Tensor, slots: Tensor) -> Tensor:
    """Return the exact scores of slots `[S, H, k]`, as `rows`; differentiable in rows, columns and core."""
    n = rows.shape[-2]
    return ((scores_of_keys(rows, slots // n) @ core) * scores_of_keys(columns, slots % n)).sum(-1)


_SQUARINGS = 8
_TINY = 1e-30


def reference_tucker_topk(
    row_scores: Tensor,
    column_scores: Tensor,
    core: Tensor,
    row_vector: Tensor,
    column_vector: Tensor,
    k: int,
    side: int,
) -> tuple[Tensor, Tensor]:
    """Find, for every head, the best pairs of the `side` rows and columns with the best leading scores.

    Shapes: scores of keys `[..., H, n, r]`, core `[H, r, r]`, vectors `[H, r]`. Returns scores `[..., H, k]`, descending, and
    slots, int64: slot `i * n + j` is row i with column j.
    """
    n, dtype = row_scores.shape[-2], row_scores.dtype
    row_leading = torch.einsum("...hnr,hr->...hn", row_scores, row_vector.to(dtype))
    column_leading = torch.einsum("...hnr,hr->...hn", column_scores, column_vector.to(dtype))
    rows, columns = (leading.topk(side, dim=-1).indices for leading in (row_leading, column_leading))
    kept_rows = scores_of_keys(row_scores, rows)  # [..., H, side, r]
    kept_columns = scores_of_keys(column_scores, columns)  # [..., H, side, r]
    scores = (kept_rows @ core.to(dtype)) @ kept_columns.transpose(-1, -2)  # [..., H, side, side]
    slots = rows.unsqueeze(-1) * n + columns.unsqueeze(-2)
    best, places = scores.flatten(-2).topk(k, dim=-1)  # [..., H, k]
    return best, slots.flatten(-2).gather(-1, places)


def scores_of_keys(scores: Tensor, keys: Tensor) -> Tensor:
    """Gather the scores `[..., H, n, r]` of keys `[..., H, side]`, to `[..., H, side, r]`."""
    return scores.gather(-2, keys.unsqueeze(-1).expand(*keys.shape, scores.shape[-1]))


def leading_vectors(core: Tensor, row_vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return the leading left and right singular vectors of `core` `[..., r, r]`: `[..., r]`, length one.

    Their sign is that of the previous left vectors, `row_vector` `[..., r]`: the first stage keeps the largest leading scores, so it
    must not flip. Repeated squaring finds them without waiting for the device. A core of zeros gives the previous left vector and
    zeros.
    """
    power = core @ core.transpose(-1, -2)
    for _ in range(_SQUARINGS):
        power = power / power.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(_TINY)
        power = power @ power
    longest = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    row = power.gather(-1, longest.expand(*power.shape[:-1], 1)).squeeze(-1)  # all columns are multiples of the vector
    before = row_vector.to(core.dtype)
    row = torch.where((row * before).sum(-1, keepdim=True) < 0, -row, row)
    row = torch.where((row == 0).all(-1, keepdim=True), before, _unit(row))
    return row, _unit((core.transpose(-1, -2) @ row.unsqueeze(-1)).squeeze(-1))


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm(dim=-1, keepdim=True).clamp_min(_TINY)
