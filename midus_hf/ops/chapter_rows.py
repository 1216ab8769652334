"""Rows of a bank whose gradient is of these rows alone, and one dense gradient for all that read it."""

from typing import Any

import torch


def chapter_rows(bank: torch.Tensor, chapters: torch.Tensor, chapter_tokens: int) -> torch.Tensor:
    """Gather whole chapters; the gradient of the bank is a sparse tensor of the rows that were read.

    Args:
        bank: `[N_m, W]`.
        chapters: `[C']`, int64, none of them twice.
        chapter_tokens: M.

    Returns:
        `[C', M, W]`.
    """
    rows = chapters.unsqueeze(1) * chapter_tokens + torch.arange(chapter_tokens, device=chapters.device)
    return _Rows.apply(bank, rows)


def with_one_gradient(bank: torch.Tensor) -> torch.Tensor:
    """The same bank for several readers, of whose gradients the sum is made dense.

    Autograd adds sparse gradients as rows. Without this there would be a gradient as large as the bank for each reader, of which a
    backward pass holds several at once.
    """
    return _OneGradient.apply(bank)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bank: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = bank.shape
        return bank.index_select(0, rows.flatten()).unflatten(0, rows.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        of_rows = gradient.flatten(0, 1)
        return torch.sparse_coo_tensor(rows.flatten()[None], of_rows, ctx.shape, check_invariants=False), None


class _OneGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bank: torch.Tensor) -> torch.Tensor:
        return bank.view_as(bank)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if not gradient.is_sparse:
            return gradient
        dense = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        return dense.index_add_(0, gradient._indices()[0], gradient._values())
