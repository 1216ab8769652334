"""Cross-attention from tokens to the chapters of a memory that are chosen for them."""

import torch
from torch.utils.checkpoint import checkpoint

from midus_hf.ops.dispatch.choices import resolve
from midus_hf.ops.dispatch.precision import without_autocast
from midus_hf.ops.moc.reference import chapter_attention as reference
from midus_hf.ops.moc.segments import segment_attention
from midus_hf.ops.moc.triton import segment_refusal

# Largest number of elements of keys that are gathered at a time: 128 MB in float32.
_MOST_GATHERED = 1 << 25

# Least number of queries with the same chapters for which gathering keys is faster than sorting tokens by chapter.
_FEWEST_TOGETHER = 16


def chapter_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend to the memory tokens of chosen chapters, all in one softmax (Mixture of Chapters, equation 4).

    All Q tokens of a segment read the same n chapters: with Q = 1 each token has its own. There is no position and no
    mask: every memory token of a chosen chapter is read.

    Scores are accumulated in float32 at least. For long segments, the keys of each segment are gathered, some
    segments at a time, and gathered again in the backward pass; torch's attention computes this on every backend
    except the reference. For short segments, tokens are sorted by chapter instead: the keys of a chapter are multiplied
    with all of its tokens at once, and no tensor holds keys per token. Under `"triton"`, kernels compute this, in the
    same order at every run.

    Args:
        query: `[S, Q, H, d]`, floating point, Q tokens of each of S segments.
        keys: `[C, M, H, d]`, M memory tokens per chapter, cast to the dtype of `query`.
        values: `[C, M, H, d]`, cast to the dtype of `query`.
        chapters: Numbers of the chapters that each segment reads, `[S, n]`, int64, from 0 to C - 1.
        scales: Factors of the keys and values of a chapter, `[S, n]`.
        backend: Body to run, as in `OpChoices`. Default: `"auto"`, which takes PyTorch for sizes that kernels refuse.

    Returns:
        `[S, Q, H, d]`, in the dtype of `query`.

    Raises:
        ValueError: If shapes disagree, or if `"triton"` is chosen for tokens that must be sorted, and heads are wider
            than 256 or there are more than 2^30 pairs of a token and a chapter, counted once per head.
    """
    _check_shapes(query, keys, values, chapters, scales)
    segments, length, heads, width = query.shape
    sorts = length < _FEWEST_TOGETHER and segments > 1
    refusal = segment_refusal(heads, width, chapters.numel() * length) if sorts else None
    body = resolve(backend, query, refusal)
    if query.numel() == 0:
        return query * 1
    if body == "reference":
        return reference(query, keys, values, chapters, scales)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    with without_autocast(query.device.type):
        if not sorts:
            return _gathered(query, keys, values, chapters, scales)
        of_tokens = (tensor.repeat_interleave(length, dim=0) for tensor in (chapters, scales))  # [S * Q, n] each
        output = segment_attention(query.flatten(0, 1), keys, values, *of_tokens, backend=body)
        return output.unflatten(0, (segments, length))


def fewest_together() -> int:
    """Return the least number of queries with the same chapters for which `chapter_attention` gathers keys."""
    return _FEWEST_TOGETHER


def _gathered(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chapters: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Compute `chapter_attention` of segments with torch's attention, some segments at a time."""
    per_segment = chapters.shape[1] * keys[0].numel()
    together = max(1, _MOST_GATHERED // per_segment)
    parts = list(zip(*(tensor.split(together) for tensor in (query, chapters, scales)), strict=True))
    outputs = []
    for part, chosen, scale in parts:
        arguments = (part, keys, values, chosen, scale)
        if len(parts) == 1 or not torch.is_grad_enabled():
            outputs.append(_attend_at_once(*arguments))
        else:
            outputs.append(checkpoint(_attend_at_once, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs)


def _attend_at_once(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chapters: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    num_segments, num_chosen = chapters.shape
    scale = scales.to(query.dtype).unsqueeze(-1)
    chosen_keys, chosen_values = _rows(keys, chapters) * scale, _rows(values, chapters) * scale  # [S, n, M * H * d]
    shape = (num_segments, num_chosen * keys.shape[1], *keys.shape[2:])
    output = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        chosen_keys.view(shape).transpose(1, 2),
        chosen_values.view(shape).transpose(1, 2),
    )
    return output.transpose(1, 2)  # [S, Q, H, d]


def _rows(table: torch.Tensor, chapters: torch.Tensor) -> torch.Tensor:
    """Return whole chapters `[S, n, M * H * d]` of a table `[C, M, H, d]`."""
    return torch.nn.functional.embedding(chapters, table.flatten(1))


def _check_shapes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chapters: torch.Tensor, scales: torch.Tensor
) -> None:
    if keys.shape != values.shape or keys.dim() != 4:
        raise ValueError(
            f"keys is {tuple(keys.shape)} and values is {tuple(values.shape)}; expected [C, M, heads, width] twice."
        )
    if query.dim() != 4 or query.shape[2:] != keys.shape[2:]:
        raise ValueError(
            f"query is {tuple(query.shape)}; expected [segments, tokens, heads, width] with the keys' {keys.shape[2]} heads "
            f"and width {keys.shape[3]}."
        )
    if chapters.dim() != 2 or chapters.shape[0] != query.shape[0] or not chapters.shape[1]:
        raise ValueError(
            f"chapters is {tuple(chapters.shape)}; expected [{query.shape[0]}, 1 or more chapters each], a row per segment."
        )
    if scales.shape != chapters.shape:
        raise ValueError(f"scales is {tuple(scales.shape)}; expected the shape of chapters, {tuple(chapters.shape)}.")
