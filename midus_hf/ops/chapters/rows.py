"""Chapters of a bank with sparse gradients."""

from typing import Any

import torch


def chapter_rows(bank: torch.Tensor, chapters: torch.Tensor, chapter_tokens: int) -> torch.Tensor:
    """Gather whole chapters. The gradient of the bank is a sparse tensor of the rows that were read.

    Args:
        bank: Memory tokens, `[N_m, W]`, chapter after chapter.
        chapters: Chapter numbers, `[C']`, int64, without repetition.
        chapter_tokens: Memory tokens per chapter, M.

    Returns:
        `[C', M, W]`.
    """
    rows = chapters.unsqueeze(1) * chapter_tokens + torch.arange(chapter_tokens, device=chapters.device)
    return _Rows.apply(bank, rows)


def with_one_gradient(bank: torch.Tensor) -> torch.Tensor:
    """Return the same bank for several readers, and make the sum of their gradients dense.

    Autograd adds the sparse gradients of the readers as rows, and this function makes the sum dense once. Without it
    each reader would give a gradient as large as the bank, and a backward pass would hold several of them at once.
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
