"""Gradients of queries and sub-keys from those of the scores that were chosen, by PyTorch's operations."""

import torch

from midus_hf.ops.best_slots import halves
from midus_hf.ops.precision import without_autocast


def query_and_key_gradients(
    into_scores: torch.Tensor,
    slots: torch.Tensor,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query `[S, H, d]`, row keys and column keys `[H, n, d / 2]`, in their dtypes.

    Args:
        into_scores: `[H, S, k]`, float32 at least.
        slots: `[H, S, k]`, int64.
        query: `[S, H, d]`.
        row_keys: `[H, n, d / 2]`.
        column_keys: `[H, n, d / 2]`.
    """
    n, wide = row_keys.shape[1], into_scores.dtype
    into_query, into_keys = [], []
    for keys, chosen, asked in zip((row_keys, column_keys), (slots // n, slots % n), halves(query, wide), strict=True):
        spread = into_scores.new_zeros(*into_scores.shape[:2], n).scatter_add_(-1, chosen, into_scores)  # [H, S, n]
        with without_autocast(query.device.type):
            into_query.append(torch.bmm(spread, keys.to(wide)))  # [H, S, d / 2]
            into_keys.append(torch.bmm(spread.transpose(1, 2), asked).to(keys.dtype))  # [H, n, d / 2]
    return torch.cat(into_query, dim=-1).transpose(0, 1).to(query.dtype).contiguous(), into_keys[0], into_keys[1]
