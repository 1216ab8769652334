"""How cross-attention to chapters is shared among them."""

import math

import torch

from midus_hf.ops.precision import without_autocast

_MOST_AT_ONCE = 1 << 24
"""Elements of keys and scores that are held at a time: 64 MB each in float32."""


def chapter_mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """The share of each chapter in the softmax of `chapter_attention`, the mean over query heads.

    Some stretches are computed at a time, so no tensor has a key per token of the batch.

    Args:
        query: `[B, T, H, d]`, floating point.
        keys: `[C, M, K, d]`; K divides H.
        chapters: `[B, U, n]`, int64, from 0 to C - 1; U divides T.
        scales: `[B, U, n]`, what the keys of a chapter are multiplied by. Default: 1.
        biases: `[B, U, n]`, what is added to the attention logits of a chapter. Default: 0.

    Returns:
        `[B, T, n]`, float32 at least; those of a token add up to 1.
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
    """Shares `[S, Q, n]` of the chapters `[S, n]` of stretches of queries `[S, Q, H, d]`."""
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
