"""Cross-attention from tokens to the chapters of a memory that are chosen for them."""

import torch
from torch.utils.checkpoint import checkpoint

from midus_hf.ops.chapters.reference import chapter_attention as reference
from midus_hf.ops.chapters.segments import segment_attention
from midus_hf.ops.chapters.triton import segment_refusal
from midus_hf.ops.dispatch.choices import resolve
from midus_hf.ops.dispatch.precision import without_autocast

# Largest number of elements of keys that are gathered at a time: 128 MB in float32.
_MOST_GATHERED = 1 << 25

# Least number of queries with the same chapters for which gathering keys is faster than sorting tokens by chapter.
_FEWEST_TOGETHER = 16


def chapter_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend to the memory tokens of chosen chapters, all in one softmax (Mixture of Chapters, equation 4).

    The T tokens of a row of the batch are cut into U stretches of equal length. All tokens of a stretch read the same n
    chapters: with U = 1 a whole sequence shares its chapters, with U = T each token has its own. There is no position
    and no mask: every memory token of a chosen chapter is read.

    Scores are accumulated in float32 at least. For long stretches, the keys of each stretch are gathered, some
    stretches at a time, and gathered again in the backward pass; torch's own attention computes this on every backend
    but the reference. For short stretches, tokens are sorted by chapter instead: the keys of a chapter are multiplied
    with all of its tokens at once, and no tensor holds keys per token. Under `"triton"`, kernels compute this, in the
    same order at every run.

    Args:
        query: `[B, T, H, d]`, floating point.
        keys: `[C, M, K, d]`, M memory tokens per chapter, cast to the dtype of `query`; K divides H.
        values: `[C, M, K, d]`, cast to the dtype of `query`.
        chapters: Numbers of the chapters that each stretch reads, `[B, U, n]`, int64, from 0 to C - 1; U divides T.
        scales: Factors of the keys and values of a chapter, `[B, U, n]`. Default: 1.
        biases: Summands of the attention logits of a chapter, `[B, U, n]`. Default: 0.
        backend: Body to run, as in `OpChoices`. Default: `"auto"`, which takes PyTorch for sizes that kernels refuse.

    Returns:
        `[B, T, H, d]`, in the dtype of `query`.

    Raises:
        ValueError: If shapes disagree, or if `"triton"` is chosen for tokens that must be sorted, and heads are wider
            than 256 or there are more than 2^30 pairs of a token and a chapter, counted once per head.
    """
    _check_shapes(query, keys, values, chapters, scales, biases)
    batch, tokens, heads, width = query.shape
    stretches, chosen = chapters.shape[1:]
    length = tokens // max(stretches, 1)
    sorts = length < _FEWEST_TOGETHER and batch * stretches > 1
    refusal = segment_refusal(heads, width, batch * tokens * chosen) if sorts else None
    body = resolve(backend, query, refusal)
    if query.numel() == 0:
        return query * 1
    if body == "reference":
        return reference(query, keys, values, chapters, scales, biases)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    flat_query = query.reshape(batch * stretches, length, heads, width)  # [S, Q, H, d]
    flat_chapters = chapters.reshape(-1, chosen)
    flat_scales = None if scales is None else scales.reshape(-1, chosen)
    flat_biases = None if biases is None else biases.reshape(-1, chosen)
    with without_autocast(query.device.type):
        if not sorts:
            output = _gathered(flat_query, keys, values, flat_chapters, flat_scales, flat_biases)
        else:
            per_token = [
                None if tensor is None else tensor.repeat_interleave(length, dim=0)
                for tensor in (flat_chapters, flat_scales, flat_biases)
            ]
            assert per_token[0] is not None
            output = segment_attention(
                flat_query.flatten(0, 1), keys, values, per_token[0], *per_token[1:], backend=body
            )
    return output.reshape(query.shape)


def fewest_together() -> int:
    """Return the least number of queries with the same chapters for which `chapter_attention` gathers keys."""
    return _FEWEST_TOGETHER


def _gathered(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `chapter_attention` of stretches by torch's own attention, some stretches at a time."""
    per_stretch = chapters.shape[1] * keys[0].numel()
    together = max(1, _MOST_GATHERED // per_stretch)
    parts = [None if tensor is None else tensor.split(together) for tensor in (query, chapters, scales, biases)]
    queries, chapter_parts, scale_parts, bias_parts = parts
    assert queries is not None and chapter_parts is not None
    outputs = []
    for number, (part, chosen) in enumerate(zip(queries, chapter_parts, strict=True)):
        scale = None if scale_parts is None else scale_parts[number]
        bias = None if bias_parts is None else bias_parts[number]
        arguments = (part, keys, values, chosen, scale, bias)
        if len(queries) == 1 or not torch.is_grad_enabled():
            outputs.append(_attend_at_once(*arguments))
        else:
            outputs.append(checkpoint(_attend_at_once, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs)


def _attend_at_once(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
) -> torch.Tensor:
    num_stretches, num_chosen = chapters.shape
    chosen_keys = _rows(keys, chapters)  # [S, n, M * K * d]
    chosen_values = _rows(values, chapters)
    if scales is not None:
        scale = scales.to(query.dtype).unsqueeze(-1)
        chosen_keys, chosen_values = chosen_keys * scale, chosen_values * scale
    shape = (num_stretches, num_chosen * keys.shape[1], *keys.shape[2:])
    mask = None
    if biases is not None:
        mask = biases.to(query.dtype).repeat_interleave(keys.shape[1], dim=-1)[:, None, None]  # [S, 1, 1, n * M]
        mask = mask.expand(-1, 1, query.shape[1], -1)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        chosen_keys.view(shape).transpose(1, 2),
        chosen_values.view(shape).transpose(1, 2),
        attn_mask=mask,
        enable_gqa=query.shape[2] != keys.shape[2],
    )
    return output.transpose(1, 2)  # [S, Q, H, d]


def _rows(table: torch.Tensor, chapters: torch.Tensor) -> torch.Tensor:
    """Return whole chapters `[S, n, M * K * d]` of a table `[C, M, K, d]`."""
    return torch.nn.functional.embedding(chapters, table.flatten(1))


def _check_shapes(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
) -> None:
    if keys.shape != values.shape or keys.dim() != 4:
        raise ValueError(
            f"keys is {tuple(keys.shape)} and values is {tuple(values.shape)}; expected [C, M, heads, width] twice."
        )
    if query.shape[-1] != keys.shape[-1] or query.shape[-2] % keys.shape[-2]:
        raise ValueError(
            f"query ends in {tuple(query.shape[-2:])}; expected a multiple of the keys' {keys.shape[-2]} heads, and their "
            f"width {keys.shape[-1]}."
        )
    batch, tokens = query.shape[:2]
    if (
        chapters.dim() != 3
        or chapters.shape[0] != batch
        or not _cuts(tokens, chapters.shape[1])
        or not chapters.shape[2]
    ):
        raise ValueError(
            f"chapters is {tuple(chapters.shape)}; expected [{batch}, a divisor of {tokens} tokens, 1 or more chapters each]."
        )
    for name, tensor in (("scales", scales), ("biases", biases)):
        if tensor is not None and tensor.shape != chapters.shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}; expected the shape of chapters, {tuple(chapters.shape)}."
            )


def _cuts(tokens: int, stretches: int) -> bool:
    """Return whether `tokens` tokens can be cut into `stretches` stretches of equal length."""
    return tokens % stretches == 0 if stretches else tokens == 0
