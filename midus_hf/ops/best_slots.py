"""The best slots of queries by as few of PyTorch's operations as it takes: for few tokens, and where compiled code is missing."""

import torch


def best_slots(
    query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, float32 at least, and slots, int64: `[H, S, k]` each, best first. Autocast is off where it is called.

    Args:
        query: `[S, H, d]`.
        row_keys: `[H, n, d / 2]`.
        column_keys: `[H, n, d / 2]`.
        k: `1 <= k <= n`.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    row_query, column_query = halves(query, wide)
    row_best, rows = torch.bmm(row_query, row_keys.to(wide).mT).topk(k, dim=-1)  # [H, S, k]
    column_best, columns = torch.bmm(column_query, column_keys.to(wide).mT).topk(k, dim=-1)
    scores, pairs = (row_best.unsqueeze(-1) + column_best.unsqueeze(-2)).flatten(-2).topk(k, dim=-1)
    slots = (rows * row_keys.shape[1]).gather(-1, pairs // k).add_(columns.gather(-1, pairs % k))
    return scores, slots


def halves(query: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The row and column halves of a query `[S, H, d]`: `[H, S, d / 2]` each.

    They are copied apart: what a matrix product of strided rows rounds to depends on where they lie in memory.
    """
    rows, columns = query.unflatten(-1, (2, -1)).permute(2, 1, 0, 3).to(dtype).contiguous()
    return rows, columns
