"""The contracts of product-key (MIDUS, equations 11 to 13) and flat retrieval (equation 4)."""

import torch
from torch import Tensor

from midus_hf.ops.dispatch.calling import without_autocast

_MAX_SCORES = 1 << 26  # largest number of scores that are held at a time: 256 MB in float32
_MAX_WIDENED = 1 << 20  # largest number of elements of keys that a CPU holds in float32 at a time: 4 MB


def product_key_topk(query: Tensor, row_keys: Tensor, column_keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find, for every head, the `k` best product keys for its query (MIDUS, equations 11 to 13).

    Shapes: query `[..., H, d]`, sub-keys `[H, n, d / 2]` per side. Returns scores `[..., H, k]`, descending, and slots, int64.
    """
    row_scores, column_scores = sub_key_scores(query, row_keys, column_keys)
    row_best, rows = row_scores.topk(k, dim=-1)  # [..., H, k]
    column_best, columns = column_scores.topk(k, dim=-1)  # [..., H, k]
    pair_scores = (row_best.unsqueeze(-1) + column_best.unsqueeze(-2)).flatten(-2)  # [..., H, k * k]
    scores, pairs = pair_scores.topk(k, dim=-1)  # [..., H, k]
    slots = rows.gather(-1, pairs // k) * row_keys.shape[1] + columns.gather(-1, pairs % k)  # [..., H, k]
    return scores, slots


def sub_key_scores(query: Tensor, row_keys: Tensor, column_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores of row and column keys, `[..., H, n]`, float32 at least (MIDUS, equation 11).

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


def flat_key_topk(query: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find, for every head, the `k` keys that score highest against its query (MIDUS, equation 4).

    Scores of half-precision queries are accumulated in float32, also under `torch.autocast`. All N scores of a token exist only while
    the best are picked. Gradients flow through the scores of the picked keys.

    Args:
        query: `[..., H, d]`, floating point.
        keys: `[H, N, d]`, cast to the dtype of `query`.
        k: Slots retrieved per head, `1 <= k <= N`.

    Returns:
        Scores `[..., H, k]`, descending, float32 (float64 for a float64 query), and slots `[..., H, k]`, int64.

    Raises:
        ValueError: If the shapes disagree, or `k` lies outside `1..N`.
    """
    if keys.dim() != 3:
        raise ValueError(f"keys is {tuple(keys.shape)}; expected [heads, slots, key width].")
    heads, slots, width = keys.shape
    if query.shape[-2:] != (heads, width):
        raise ValueError(f"query ends in {tuple(query.shape[-2:])}; expected (heads, key width) = ({heads}, {width}).")
    if not 1 <= k <= slots:
        raise ValueError(f"k is {k}; expected 1 <= k <= N = {slots}. Lower k or raise N.")
    score_dtype = torch.promote_types(query.dtype, torch.float32)
    leading = query.shape[:-2]
    rounded_keys = keys.to(query.dtype)
    with without_autocast(query.device.type):
        flat_query = query.reshape(-1, heads, width).transpose(0, 1).to(score_dtype)  # [H, S, d]
        with torch.no_grad():
            chosen = _best_keys(flat_query, rounded_keys, k)  # [H, S, k]
        offsets = slots * torch.arange(heads, device=query.device).view(heads, 1, 1)
        all_keys = rounded_keys.flatten(0, 1)  # [H * N, d]
        if torch.is_grad_enabled() and all_keys.requires_grad:
            # Thousands of tokens may choose one key: this copy sums the gradient of the key in float32.
            all_keys = all_keys.to(score_dtype)
        chosen_keys = torch.nn.functional.embedding(chosen + offsets, all_keys).to(score_dtype)  # [H, S, k, d]
        scores = (chosen_keys * flat_query.unsqueeze(2)).sum(-1)  # [H, S, k]
    return scores.transpose(0, 1).reshape(*leading, heads, k), chosen.transpose(0, 1).reshape(*leading, heads, k)


def _best_keys(query: Tensor, keys: Tensor, k: int) -> Tensor:
    """Return the indices `[H, S, k]` of the best keys, widened by heads so that a CPU's cache holds them."""
    heads, slots, width = keys.shape
    together = max(1, _MAX_WIDENED // (slots * width)) if keys.device.type == "cpu" else heads
    stretch = max(1, _MAX_SCORES // (min(together, heads) * slots))
    best = []
    for keys_of_heads, queries in zip(keys.split(together), query.split(together), strict=True):
        columns = keys_of_heads.to(query.dtype).transpose(1, 2)  # [H', d, N]
        parts = [torch.bmm(part, columns).topk(k, dim=-1).indices for part in queries.split(stretch, dim=1)]
        best.append(torch.cat(parts, dim=1))  # [H', S, k]
    return torch.cat(best)
