"""Cross-attention of tokens that read different chapters: pairs of a token and a chapter are sorted by chapter."""

import math
from typing import Any, NamedTuple, Optional

import torch

from midus_hf.ops.chapters.triton.forward import SegmentReading, triton_segments
from midus_hf.ops.chapters.triton.gradients import triton_segment_gradients
from midus_hf.ops.dispatch.calling import custom_op

# Rows per block: the tokens that one matrix product multiplies with the keys of a chapter.
_ROWS = 32


class Segments(NamedTuple):
    """Pairs of a token and a chapter, sorted by chapter, with padding so that each block of rows has one chapter.

    Args:
        token_of_row: Token of each row, `[R]`, int64; 0 for padding.
        chapter_of_block: Chapter of each block, `[R / _ROWS]`, int64.
        row_of_pair: Row of each pair, `[N * n]`, int64.
    """

    token_of_row: torch.Tensor
    chapter_of_block: torch.Tensor
    row_of_pair: torch.Tensor


def segment_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    *,
    backend: str = "torch",
) -> torch.Tensor:
    """Attend from each token to the memory tokens of the token's chapters, in one softmax.

    Every pair of a token and a chapter gives an output and the log-sum-exp of its scores. The outputs of a token's
    pairs are then weighted by the softmax over their log-sum-exps, which equals one softmax over all memory tokens.

    Args:
        query: `[N, H, d]`.
        keys: `[C, M, K, d]`, in the dtype of `query`.
        values: `[C, M, K, d]`, in the dtype of `query`.
        chapters: Chapters that each token reads, `[N, n]`, int64.
        scales: Factors of the keys and values of a chapter, `[N, n]`. Default: 1.
        biases: Summands of the attention logits of a chapter, `[N, n]`. Default: 0.
        backend: `"torch"` or `"triton"`. Default: `"torch"`.

    Returns:
        `[N, H, d]`.
    """
    if backend == "triton":
        wide = (None if of_pair is None else of_pair.float() for of_pair in (scales, biases))
        return segment_attention_op(query, keys, values, chapters, *wide)[0]
    tokens, num_chosen = chapters.shape
    score_dtype = torch.promote_types(query.dtype, torch.float32)
    num_kv_heads = keys.shape[2]
    segments = sort_by_chapter(chapters, len(keys))
    rows = query.index_select(0, segments.token_of_row).unflatten(0, (-1, _ROWS))  # [blocks, _ROWS, H, d]
    rows = rows.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [blocks, K, G, _ROWS, d]
    block_keys, block_values = (_of_blocks(table, segments.chapter_of_block) for table in (keys, values))
    shape = rows.shape
    scores = (rows.flatten(2, 3) @ block_keys.transpose(-1, -2)).to(score_dtype)  # [blocks, K, G * _ROWS, M]
    scores = scores / math.sqrt(query.shape[-1])
    if scales is not None:
        scale_of_row = _per_row(scales.to(score_dtype), segments)  # [blocks, _ROWS]
        scores = scores.unflatten(2, (-1, _ROWS)) * scale_of_row[:, None, None, :, None]
        scores = scores.flatten(2, 3)
    log_sums = scores.logsumexp(dim=-1, keepdim=True)  # [blocks, K, G * _ROWS, 1]
    outputs = (scores - log_sums).exp().to(query.dtype) @ block_values  # [blocks, K, G * _ROWS, d]

    by_row = outputs.view(shape).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)  # [R, H, d]
    sums_by_row = log_sums.view(*shape[:-1]).permute(0, 3, 1, 2).flatten(0, 1).flatten(1, 2)  # [R, H]
    of_pair = by_row.index_select(0, segments.row_of_pair).view(tokens, num_chosen, *by_row.shape[1:])
    sums = sums_by_row.index_select(0, segments.row_of_pair).view(tokens, num_chosen, -1)  # [N, n, H]
    if biases is not None:
        sums = sums + biases.to(score_dtype).unsqueeze(-1)
    weights = sums.softmax(dim=1)
    if scales is not None:
        weights = weights * scales.to(score_dtype).unsqueeze(-1)
    return torch.einsum("tnh,tnhd->thd", weights.to(query.dtype), of_pair)


def sort_by_chapter(chapters: torch.Tensor, num_chapters: int) -> Segments:
    """Assign a row to every pair of a token and a chapter, so that no block of rows has two chapters.

    The number of rows depends on shapes only, so that nothing waits for the device: it is `N * n`, rounded up to whole
    blocks, plus one block per chapter, or per pair if there are fewer pairs than chapters.

    Args:
        chapters: Chapters that each token reads, `[N, n]`, int64.
        num_chapters: Number of chapters in the memory, C.
    """
    tokens, num_chosen = chapters.shape
    pairs = tokens * num_chosen
    order = chapters.flatten().argsort(stable=True)  # [N * n]
    sorted_chapters = chapters.flatten()[order]
    counts = torch.zeros(num_chapters, dtype=torch.int64, device=chapters.device)
    counts.scatter_add_(0, sorted_chapters, torch.ones_like(sorted_chapters))
    blocks = (counts + _ROWS - 1) // _ROWS
    last_blocks = blocks.cumsum(0)  # [C]
    first_rows = (last_blocks - blocks) * _ROWS
    first_pairs = counts.cumsum(0) - counts
    rank = torch.arange(pairs, device=chapters.device) - first_pairs[sorted_chapters]
    sorted_rows = first_rows[sorted_chapters] + rank  # [N * n]
    num_blocks = -(-pairs // _ROWS) + min(num_chapters, pairs)
    token_of_row = torch.zeros(num_blocks * _ROWS, dtype=torch.int64, device=chapters.device)
    token_of_row[sorted_rows] = order // num_chosen
    row_of_pair = torch.empty_like(order)
    row_of_pair[order] = sorted_rows
    block_numbers = torch.arange(num_blocks, device=chapters.device)
    chapter_of_block = torch.searchsorted(last_blocks, block_numbers, right=True).clamp(max=num_chapters - 1)
    return Segments(token_of_row, chapter_of_block, row_of_pair)


def _of_blocks(table: torch.Tensor, chapter_of_block: torch.Tensor) -> torch.Tensor:
    """Return the memory tokens `[blocks, K, M, d]` of each block's chapter."""
    rows = torch.nn.functional.embedding(chapter_of_block, table.flatten(1))
    return rows.view(-1, *table.shape[1:]).transpose(1, 2)


def _per_row(of_pair: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Copy the number of each pair, `[N, n]`, to the row of the pair, `[blocks, _ROWS]`. Padding gets 0."""
    rows = of_pair.new_zeros(len(segments.token_of_row))
    return rows.index_put((segments.row_of_pair,), of_pair.flatten()).view(-1, _ROWS)


@custom_op("chapter_segments")
def segment_attention_op(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapters: torch.Tensor,
    scales: Optional[torch.Tensor],  # noqa: UP045 - torch.library reads this form alone
    biases: Optional[torch.Tensor],  # noqa: UP045
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `segment_attention` by kernels, with scales and biases in float32.

    Returns:
        The output, and for the gradient the log-sum-exp of each token and head `[N, H]`, the pairs sorted by chapter
        `[N * n]`, and the index of each chapter's first pair among these `[C + 1]`.
    """
    return triton_segments(query, keys, values, chapters, scales, biases)


@segment_attention_op.register_fake
def _(query, keys, values, chapters, scales, biases):  # type: ignore[no-untyped-def]
    return (
        query.new_empty(query.shape),
        query.new_empty(query.shape[:2], dtype=torch.float32),
        query.new_empty(chapters.numel(), dtype=torch.int32),
        query.new_empty(keys.shape[0] + 1, dtype=torch.int32),
    )


@custom_op("chapter_segments_backward")
def segment_gradients_op(
    gradient: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: Optional[torch.Tensor],  # noqa: UP045
    biases: Optional[torch.Tensor],  # noqa: UP045
    output: torch.Tensor,
    log_sums: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    wants_rows: bool,
    wants_tables: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, keys, values, scales and biases.

    Gradients of query, scales and biases are empty tensors if `wants_rows` is false, gradients of keys and values if
    `wants_tables` is false, and gradients of scales or biases also if the call had none.
    """
    reading = SegmentReading(output, log_sums, order, offsets)
    gradients = triton_segment_gradients(
        gradient, query, keys, values, (scales, biases), reading, wants_rows, wants_tables
    )
    into_query, into_keys, into_values, into_scales, into_biases = (
        query.new_empty(0) if part is None else part for part in gradients
    )
    return into_query, into_keys, into_values, into_scales, into_biases


@segment_gradients_op.register_fake
def _(  # type: ignore[no-untyped-def]
    gradient,
    query,
    keys,
    values,
    scales,
    biases,
    output,
    log_sums,
    order,
    offsets,
    wants_rows,
    wants_tables,
):
    wanted = (
        (query, wants_rows),
        (keys, wants_tables),
        (values, wants_tables),
        (scales, wants_rows),
        (biases, wants_rows),
    )
    return tuple(
        tensor.new_empty(tensor.shape) if wants and tensor is not None else query.new_empty(0)
        for tensor, wants in wanted
    )


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, keys, values, _, scales, biases = inputs
    ctx.save_for_backward(query, keys, values, scales, biases, *output)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple:
    query, keys, values, _, scales, biases = ctx.needs_input_grad
    gradients = segment_gradients_op(gradient, *ctx.saved_tensors, query or scales or biases, keys or values)
    wanted = (query, keys, values, scales, biases)
    into_query, into_keys, into_values, *rest = (
        part if wants else None for part, wants in zip(gradients, wanted, strict=True)
    )
    return into_query, into_keys, into_values, None, *rest


segment_attention_op.register_autograd(_differentiate, setup_context=_save)
