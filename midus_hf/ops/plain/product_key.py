"""Product-key retrieval, and head-wise memory on top of it (MIDUS, equations 11 to 17)."""

import torch

from midus_hf.ops.precision import without_autocast


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
    """Return the scores of all row and of all column keys (MIDUS, equation 11): `[..., H, n]` each, float32 at least.

    Keys are rounded to the dtype of the query first, where that is narrower.
    """
    row_keys, column_keys = row_keys.to(query.dtype), column_keys.to(query.dtype)
    score_dtype = torch.promote_types(query.dtype, torch.float32)
    query_row, query_column = query.to(score_dtype).split(row_keys.shape[-1], dim=-1)  # 2 x [..., H, d / 2]
    with without_autocast(query.device.type):
        return (
            torch.einsum("...hp,hnp->...hn", query_row, row_keys.to(score_dtype)),
            torch.einsum("...hp,hnp->...hn", query_column, column_keys.to(score_dtype)),
        )


def headwise_memory(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    value_bank: torch.Tensor,
    value_transform: torch.Tensor | None,
    k: int,
    *,
    residual: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Retrieve from the memory of every head: `M_h = W_h sum_m alpha_m V[slot_m]` (MIDUS, equations 11 to 17).

    Args:
        query: `[..., H, d]`, floating point: the attention output of each head.
        row_keys: `[H, n, d / 2]`, K^row. Tables are cast to the dtype of the query.
        column_keys: `[H, n, d / 2]`, K^col.
        value_bank: `[n * n, v]`, the shared base values; or `[H, n * n, v]`, a bank per head.
        value_transform: `[H, v, v]`, the transforms W_h. None where values are used as they are.
        k: Slots retrieved per head, `1 <= k <= n`.
        residual: `[..., H, v]`, whose dtype the output then has; added to what is retrieved. Default: none.
        temperature: Scores are divided by it before the softmax. Default: 1.

    Returns:
        `[..., H, v]`, the dtype of `query`, or of `residual` if there is one.
    """
    with without_autocast(query.device.type):
        scores, slots = product_key_topk(query, row_keys, column_keys, k)  # [..., H, k]
        value_bank = value_bank.to(query.dtype)
        weights = (scores / temperature).softmax(dim=-1).to(value_bank.dtype)  # [..., H, k]
        # Thousands of tokens may hit one slot: the gradient of a half-precision bank is summed in float32, in this copy.
        learns = torch.is_grad_enabled() and value_bank.requires_grad
        summing_bank = value_bank.to(torch.promote_types(value_bank.dtype, torch.float32)) if learns else value_bank
        if value_bank.dim() == 3:
            first_slots = row_keys.shape[1] ** 2 * torch.arange(len(value_bank), device=slots.device).unsqueeze(-1)
            slots = slots + first_slots  # [H, 1] more, in a bank of all heads
            summing_bank = summing_bank.flatten(0, 1)  # [H * N, v]
        retrieved = torch.nn.functional.embedding(slots, summing_bank).to(value_bank.dtype)  # [..., H, k, v]
        output = torch.einsum("...hk,...hkv->...hv", weights, retrieved)  # [..., H, v]
        if value_transform is not None:
            output = torch.einsum("...hv,hwv->...hw", output, value_transform.to(query.dtype))  # [..., H, v]
        return output if residual is None else (residual + output).to(residual.dtype)
