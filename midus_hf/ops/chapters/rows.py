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


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bank: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = bank.shape
        return bank.index_select(0, rows.flatten()).unflatten(0, rows.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        row_gradients = gradient.flatten(0, 1)
        return torch.sparse_coo_tensor(rows.flatten()[None], row_gradients, ctx.shape, check_invariants=False), None
