"""Product-key retrieval: the k best of n * n keys at the price of scoring 2 * n of them."""

import contextlib

import torch

from midus_hf.ops.backend import resolve_backend


def product_key_topk(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    k: int,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find, for every head, the `k` product keys that score highest against its query.

    Slot `i * n + j` has the score `<q_row, K_row[i]> + <q_column, K_column[j]>`, where `q_row` and `q_column` are the
    halves of the query. The k best slots all lie in the grid of the k best rows and the k best columns, so two small
    selections give exactly what one selection over all `n * n` slots would (MIDUS, equations 11 to 13).

    Scores are accumulated in float32 for half-precision queries, under `torch.autocast` too: rounding them first would
    change the selection.

    Args:
        query: `[..., H, d]`, floating point, `d` even.
        row_keys: `[H, n, d / 2]`, the dtype of `query`.
        column_keys: `[H, n, d / 2]`, the dtype of `query`.
        k: Slots retrieved a head, `1 <= k <= n`.
        backend: `"auto"` or `"torch"`. Default: `"auto"`.

    Returns:
        Scores `[..., H, k]`, descending, float32 (float64 for a float64 query), and slots `[..., H, k]`, int64.

    Raises:
        ValueError: If the shapes disagree, `d` is odd, or `k` lies outside `1..n`.
    """
    resolve_backend(backend)
    if row_keys.dim() != 3:
        raise ValueError(f"row_keys is {tuple(row_keys.shape)}; expected [heads, n, sub-key width].")
    heads, n, half = row_keys.shape
    if column_keys.shape != row_keys.shape:
        raise ValueError(
            f"column_keys is {tuple(column_keys.shape)}; expected the shape of row_keys, {tuple(row_keys.shape)}."
        )
    if query.shape[-2:] != (heads, 2 * half):
        raise ValueError(
            f"query ends in {tuple(query.shape[-2:])}; expected (heads, 2 * sub-key width) = ({heads}, {2 * half})."
        )
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; expected 1 <= k <= n = {n}. Lower k or raise n.")

    score_dtype = torch.promote_types(query.dtype, torch.float32)
    query_row, query_column = query.to(score_dtype).split(half, dim=-1)  # 2 x [..., H, d / 2]
    with _without_autocast(query.device.type):
        row_scores = torch.einsum("...hp,hnp->...hn", query_row, row_keys.to(score_dtype))  # [..., H, n]
        column_scores = torch.einsum("...hp,hnp->...hn", query_column, column_keys.to(score_dtype))  # [..., H, n]

    row_best, rows = row_scores.topk(k, dim=-1)  # [..., H, k]
    column_best, columns = column_scores.topk(k, dim=-1)  # [..., H, k]
    pair_scores = (row_best.unsqueeze(-1) + column_best.unsqueeze(-2)).flatten(-2)  # [..., H, k * k]
    scores, pairs = pair_scores.topk(k, dim=-1)  # [..., H, k]
    slots = rows.gather(-1, pairs // k) * n + columns.gather(-1, pairs % k)  # [..., H, k]
    return scores, slots


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
