"""Chapters of a bank with sparse gradients, and the shares of chapters in attention."""

import math
from typing import Any

import torch

from midus_hf.ops.dispatch.precision import without_autocast

# Largest number of elements of keys, and of scores, that are held at a time: 64 MB each in float32.
_MOST_AT_ONCE = 1 << 24


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


def chapter_mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the share of each chapter in the softmax of `chapter_attention`, averaged over query heads.

    Some stretches are computed at a time, so no tensor holds keys for each token of the batch.

    Args:
        query: `[B, T, H, d]`, floating point.
        keys: `[C, M, K, d]`; K divides H.
        chapters: Chapters that each stretch reads, `[B, U, n]`, int64, from 0 to C - 1; U divides T.
        scales: Factors of the keys of a chapter, `[B, U, n]`. Default: 1.
        biases: Summands of the attention logits of a chapter, `[B, U, n]`. Default: 0.

    Returns:
        `[B, T, n]`, float32 at least; the n shares of a token add up to 1.
    """
    batch, tokens, heads, width = query.shape
    stretches, chosen = chapters.shape[1:]
    if query.numel() == 0:
        return query.new_zeros(batch, tokens, chosen, dtype=torch.promote_types(query.dtype, torch.float32))
    length = tokens // stretches
    scores_each = heads * length * chosen * keys.shape[1]
    together = max(1, _MOST_AT_ONCE // max(scores_each, chosen * keys[0].numel()))
    parts = [
        None if of_stretch is None else of_stretch.flatten(0, 1).split(together)
        for of_stretch in (query.reshape(batch, stretches, length, heads, width), chapters, scales, biases)
    ]
    queries, chapter_parts, scale_parts, bias_parts = parts
    assert queries is not None and chapter_parts is not None
    with without_autocast(query.device.type):
        masses = [
            _mass(
                part,
                keys,
                chapter_parts[number],
                None if scale_parts is None else scale_parts[number],
                None if bias_parts is None else bias_parts[number],
            )
            for number, part in enumerate(queries)
        ]
    return torch.cat(masses).view(batch, tokens, chosen)


def _mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
) -> torch.Tensor:
    """Return the shares `[S, Q, n]` of chapters `[S, n]` for stretches of queries `[S, Q, H, d]`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    chosen_keys = keys[chapters].to(wide)  # [S, n, M, K, d]
    grouped = query.to(wide).unflatten(2, (keys.shape[2], -1))  # [S, Q, K, G, d]
    scores = torch.einsum("sqkgd,snmkd->sqkgnm", grouped, chosen_keys) / math.sqrt(query.shape[-1])
    if scales is not None:
        scores = scores * scales.to(wide)[:, None, None, None, :, None]
    if biases is not None:
        scores = scores + biases.to(wide)[:, None, None, None, :, None]
    per_chapter = scores.logsumexp(-1)  # [S, Q, K, G, n]
    return per_chapter.softmax(-1).mean((2, 3))
