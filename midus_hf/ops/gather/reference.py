"""Contracts of weighted sums of rows of large tables, and of products of vectors with these rows."""

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted_gather(bank: Tensor, slots: Tensor, weights: Tensor, sparse_gradient: bool = False) -> Tensor:
    """Sum rows of a table, `out = sum_m weights[..., m] * bank[slots[..., m]]` (MIDUS, equation 14).

    Shapes: bank `[R, v]`, slots and weights `[..., m]`; the result `[..., v]` has the dtype of the bank.
    """
    rows = _rows(bank, slots, sparse_gradient)  # [..., m, v]
    return (weights.to(rows.dtype).unsqueeze(-1) * rows).sum(-2).to(bank.dtype)


def gathered_products(vectors: Tensor, bank: Tensor, slots: Tensor, sparse_gradient: bool = False) -> Tensor:
    """Multiply vectors with rows: `out[..., m] = <vectors, bank[slots[..., m]]>` (UltraMemV2, eq. 15).

    Shapes: vectors `[..., v]`, bank `[R, v]`, slots `[..., m]`; the result `[..., m]` is float32 at least.
    """
    rows = _rows(bank, slots, sparse_gradient)  # [..., m, v]
    vectors = vectors.to(bank.dtype).to(rows.dtype)
    return (rows * vectors.unsqueeze(-2)).sum(-1)  # a matrix product would be narrowed under autocast


def _rows(bank: Tensor, slots: Tensor, sparse_gradient: bool) -> Tensor:
    """Return rows in float32 at least, so that thousands of gradients of a row are summed in float32."""
    wide = torch.promote_types(bank.dtype, torch.float32)
    if torch.is_grad_enabled() and bank.requires_grad:
        return F.embedding(slots, bank.to(wide), sparse=sparse_gradient)
    return F.embedding(slots, bank).to(wide)
