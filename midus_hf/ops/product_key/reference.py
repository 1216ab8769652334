"""The contract of product-key retrieval (MIDUS, equations 11 to 13)."""

import torch

from midus_hf.ops.dispatch.precision import without_autocast


def product_key_topk(
    query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find, for every head, the `k` product keys that score highest against its query (MIDUS, equations 11 to 13).

    Args:
        query: `[..., H, d]`, floating point, `d` even.
        row_keys: `[H, n, d / 2]`, cast to the dtype of `query`.
        column_keys: `[H, n, d / 2]`, cast to the dtype of `query`.
        k: Slots retrieved per head, `1 <= k <= n`.

    Returns:
        Scores `[..., H, k]`, descending, float32 at least, and slots `[..., H, k]`, int64.
    """
    row_scores, column_scores = sub_key_scores(query, row_keys, column_keys)
    row_best, rows = row_scores.topk(k, dim=-1)  # [..., H, k]
    column_best, columns = column_scores.topk(k, dim=-1)  # [..., H, k]
    pair_scores = (row_best.unsqueeze(-1) + column_best.unsqueeze(-2)).flatten(-2)  # [..., H, k * k]
    scores, pairs = pair_scores.topk(k, dim=-1)  # [..., H, k]
    slots = rows.gather(-1, pairs // k) * row_keys.shape[1] + columns.gather(-1, pairs % k)  # [..., H, k]
    return scores, slots


def sub_key_scores(
    query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of all row keys and of all column keys (MIDUS, equation 11): `[..., H, n]` each, float32 at least.

    Keys are cast to the dtype of the query first.
    """
    row_keys, column_keys = row_keys.to(query.dtype), column_keys.to(query.dtype)
    score_dtype = torch.promote_types(query.dtype, torch.float32)
    query_row, query_column = query.to(score_dtype).split(row_keys.shape[-1], dim=-1)  # 2 x [..., H, d / 2]
    with without_autocast(query.device.type):
        return (
            torch.einsum("...hp,hnp->...hn", query_row, row_keys.to(score_dtype)),
            torch.einsum("...hp,hnp->...hn", query_column, column_keys.to(score_dtype)),
        )
