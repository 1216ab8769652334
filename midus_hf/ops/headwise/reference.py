"""The contract of head-wise memory (MIDUS, equations 11 to 17)."""

import torch

from midus_hf.ops.dispatch.precision import without_autocast
from midus_hf.ops.product_key.reference import product_key_topk


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
