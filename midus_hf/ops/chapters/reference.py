"""Cross-attention from tokens to the chapters that are chosen for them (Mixture of Chapters, equation 4)."""

import math

import torch

from midus_hf.ops.dispatch.precision import without_autocast


def chapter_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to the memory tokens of chosen chapters, all in one softmax.

    Args:
        query: `[B, T, H, d]`, floating point; the T tokens are cut into U stretches of equal length.
        keys: `[C, M, K, d]`, M memory tokens per chapter, cast to the dtype of `query`; K divides H.
        values: `[C, M, K, d]`, cast to the dtype of `query`.
        chapters: Chapters that each stretch reads, `[B, U, n]`, int64; U divides T.
        scales: Factors of the keys and values of a chapter, `[B, U, n]`. Default: 1.
        biases: Summands of the attention logits of a chapter, `[B, U, n]`. Default: 0.

    Returns:
        `[B, T, H, d]`, in the dtype of `query`.
    """
    if query.numel() == 0:
        return query * 1
    score_dtype = torch.promote_types(query.dtype, torch.float32)
    heads, kv_heads, chosen = query.shape[2], keys.shape[2], chapters.shape[2]
    with without_autocast(query.device.type):
        by_stretch = query.reshape(-1, query.shape[1] // chapters.shape[1], *query.shape[2:])  # [S, Q, H, d]
        keys, values = (
            tensor.to(query.dtype).to(score_dtype)[chapters.reshape(-1, chosen)] for tensor in (keys, values)
        )  # [S, n, M, K, d]; widened before indexing, so that gradients of stretches with the same chapter are summed in float32
        if scales is not None:
            scale = scales.reshape(-1, chosen).to(score_dtype)[:, :, None, None, None]
            keys, values = keys * scale, values * scale
        grouped = by_stretch.to(score_dtype).unflatten(2, (kv_heads, heads // kv_heads))  # [S, Q, K, G, d]
        scores = torch.einsum("sqkgd,snmkd->skgqnm", grouped, keys) / math.sqrt(query.shape[-1])
        if biases is not None:
            scores = scores + biases.reshape(-1, chosen).to(score_dtype)[:, None, None, None, :, None]
        weights = scores.flatten(-2).softmax(dim=-1).unflatten(-1, scores.shape[-2:])
        output = torch.einsum("skgqnm,snmkd->sqkgd", weights, values)
    return output.flatten(2, 3).to(query.dtype).reshape(query.shape)


def chapter_rows(bank: torch.Tensor, chapters: torch.Tensor, chapter_tokens: int) -> torch.Tensor:
    """Gather whole chapters.

    Args:
        bank: Memory tokens, `[N_m, W]`, chapter after chapter.
        chapters: Chapter numbers, `[C']`, int64.
        chapter_tokens: Memory tokens per chapter, M.

    Returns:
        `[C', M, W]`.
    """
    return bank.unflatten(0, (-1, chapter_tokens))[chapters]
