"""Bodies that the paper prints: selection over the grid of all slots, and Algorithm 1 (MIDUS, appendix C)."""

from typing import Any

import torch

from midus_hf.ops.gather.row_sums import weight_gradients, weighted_rows
from midus_hf.ops.product_key.reference import sub_key_scores


def cartesian_topk(
    query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select by one selection over the Cartesian grid of all slots (MIDUS, equations 21 and 22); see `product_key_topk`."""
    row_scores, column_scores = sub_key_scores(query, row_keys, column_keys)
    grid = (row_scores.unsqueeze(-1) + column_scores.unsqueeze(-2)).flatten(-2)  # [S, H, n * n]
    scores, slots = grid.topk(k, dim=-1)
    return scores, slots


def gather_by_algorithm_1(bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum rows by weight as `weighted_gather` does, with the gradient of the bank as Algorithm 1 sums it.

    Args:
        bank: `[R, v]`.
        slots: `[S, m]`, int64.
        weights: `[S, m]`.

    Returns:
        `[S, v]`.
    """
    return _Algorithm1.apply(bank, slots, weights)


class _Algorithm1(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(bank, slots, weights)
        return weighted_rows(bank, slots, weights, "torch")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        bank, slots, weights = ctx.saved_tensors
        expanded = gradient.unsqueeze(1).expand(-1, slots.shape[1], -1)
        terms = (expanded * weights.to(gradient.dtype).unsqueeze(-1)).flatten(
            0, 1
        )  # [S * m, v], in half precision as printed
        unique, inverse = torch.unique(slots.flatten(), return_inverse=True)
        aggregated = terms.new_zeros(len(unique), terms.shape[1]).index_add_(0, inverse, terms)
        into_bank = terms.new_zeros(bank.shape).index_add_(0, unique, aggregated)
        return into_bank.to(bank.dtype), None, weight_gradients(gradient, bank, slots, "torch").to(weights.dtype)
