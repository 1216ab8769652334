"""The contract of retrieval by Tucker-decomposed keys (UltraMemV2, equations 6, 7, 10 and 11)."""

import torch
from torch import Tensor

_SQUARINGS = 8
_TINY = 1e-30


def tucker_topk(
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
    kept_rows, kept_columns = (
        scores_of_keys(row_scores, rows),
        scores_of_keys(column_scores, columns),
    )  # [..., H, side, r] each
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
