"""The contract of head-wise memory (MIDUS, equations 11 to 17)."""

import torch
from torch import Tensor

from midus_hf.ops.dispatch.calling import without_autocast
from midus_hf.ops.product_key.reference import product_key_topk


def headwise_memory(
    query: Tensor,
    row_keys: Tensor,
    column_keys: Tensor,
    value_bank: Tensor,
    value_transform: Tensor | None,
    k: int,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """Retrieve for every head: `M_h = W_h sum_m alpha_m V[slot_m]` (MIDUS, equations 11 to 17).

    Shapes: query `[..., H, d]`, sub-keys `[H, n, d / 2]`, values `[n * n, v]` or, per head, `[H, n * n, v]`, transforms `[H, v, v]`,
    residual and result `[..., H, v]`. Tables are cast to the query's dtype. A residual is added, in its dtype.
    """
    with without_autocast(query.device.type):
        scores, slots = product_key_topk(query, row_keys, column_keys, k)  # [..., H, k]
        value_bank = value_bank.to(query.dtype)
        weights = scores.softmax(dim=-1).to(value_bank.dtype)  # [..., H, k]
        # Thousands of tokens may read one slot: this copy sums the gradient of a half-precision bank in float32.
        learns = torch.is_grad_enabled() and value_bank.requires_grad
        summing_bank = value_bank.to(torch.promote_types(value_bank.dtype, torch.float32)) if learns else value_bank
        if value_bank.dim() == 3:
            first_slots = row_keys.shape[1] ** 2 * torch.arange(len(value_bank), device=slots.device).unsqueeze(-1)
            slots = slots + first_slots  # + [H, 1]: slots in the bank of all heads
            summing_bank = summing_bank.flatten(0, 1)  # [H * N, v]
        retrieved = torch.nn.functional.embedding(slots, summing_bank).to(value_bank.dtype)  # [..., H, k, v]
        output = torch.einsum("...hk,...hkv->...hv", weights, retrieved)  # [..., H, v]
        if value_transform is not None:
            output = torch.einsum("...hv,hwv->...hw", output, value_transform.to(query.dtype))  # [..., H, v]
        return output if residual is None else (residual + output).to(residual.dtype)
