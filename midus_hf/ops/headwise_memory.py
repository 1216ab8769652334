"""The head-wise memory of MIDUS: product-key retrieval a head, and values expanded a head from one shared bank."""

import torch
import torch.nn.functional as F

from midus_hf.ops.product_key import product_key_topk


def headwise_memory(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    value_bank: torch.Tensor,
    value_transform: torch.Tensor,
    k: int,
    backend: str = "auto",
) -> torch.Tensor:
    """Retrieve from the memory of every head (MIDUS, equations 11 to 17).

    Head `h` retrieves its `k` best of `N = n * n` slots, weighs them by the softmax of their scores, sums the rows of
    the shared bank so weighed, and maps the sum by its own transform: `M_h = W_h sum_m alpha_m V[slot_m]` (HIVE,
    equation 16). The heads' outputs stand side by side, as an attention's do.

    Args:
        query: `[..., H, d]`, floating point: the attention output of each head.
        row_keys: `[H, n, d / 2]`, the sub-keys K^row.
        column_keys: `[H, n, d / 2]`, the sub-keys K^col.
        value_bank: `[n * n, v]`, the shared base values, with v = D / H in MIDUS.
        value_transform: `[H, v, v]`, the transforms W_h; each maps a column vector, as in the paper.
        k: Slots retrieved a head, `1 <= k <= n`.
        backend: `"auto"` or `"torch"`. Default: `"auto"`.

    Returns:
        `[..., H, v]`, the dtype of `value_bank`.

    Raises:
        ValueError: If the shapes disagree, or `k` lies outside `1..n`.
    """
    scores, slots = product_key_topk(query, row_keys, column_keys, k, backend)  # [..., H, k]
    heads, n, _ = row_keys.shape
    if value_bank.dim() != 2 or len(value_bank) != n * n:
        raise ValueError(f"value_bank is {tuple(value_bank.shape)}; expected [n * n, v] with n * n = {n * n}.")
    width = value_bank.shape[1]
    if value_transform.shape != (heads, width, width):
        raise ValueError(
            f"value_transform is {tuple(value_transform.shape)}; expected (H, v, v) = {(heads, width, width)}."
        )

    weights = scores.softmax(dim=-1).to(value_bank.dtype)  # [..., H, k]
    # Thousands of tokens may hit one slot: the gradient of a half-precision bank is summed in float32, in this copy.
    summing_bank = value_bank.to(torch.promote_types(value_bank.dtype, torch.float32))  # [n * n, v]
    retrieved = F.embedding(slots, summing_bank).to(value_bank.dtype)  # [..., H, k, v]
    base_output = torch.einsum("...hk,...hkv->...hv", weights, retrieved)  # [..., H, v]
    return torch.einsum("...hv,hwv->...hw", base_output, value_transform)  # [..., H, v]
