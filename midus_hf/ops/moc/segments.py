"""Cross-attention of tokens that read different chapters: pairs of a token and a chapter are sorted by chapter."""

import math
from typing import Any, NamedTuple

import torch

from midus_hf.ops.dispatch.calling import custom_op
from midus_hf.ops.moc.triton import BLOCK_ROWS, triton_chapter_blocks, triton_chapter_gradients


class SortedPairs(NamedTuple):
    """Pairs of a token and a chapter, sorted by chapter, with padding so that each block of rows has one chapter.

    Args:
        pair_of_row: Pair of each row, `[R]`, int64; 0 for padding.
        chapter_of_block: Chapter of each block, `[R / BLOCK_ROWS]`, int64.
        block_ends: Number of blocks up to and including each chapter, `[C]`, int64.
        row_of_pair: Row of each pair, `[N * n]`, int64.
    """

    pair_of_row: torch.Tensor
    chapter_of_block: torch.Tensor
    block_ends: torch.Tensor
    row_of_pair: torch.Tensor


def segment_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor,
    *,
    backend: str = "torch",
) -> torch.Tensor:
    """Attend from each token to the memory tokens of the token's chapters, in one softmax.

    Every pair of a token and a chapter gives an output and the log-sum-exp of its scores. The outputs of a token's
    pairs are then weighted by the softmax over their log-sum-exps, which equals one softmax over all memory tokens.

    Args:
        query: `[N, H, d]`.
        keys: `[C, M, H, d]`, in the dtype of `query`.
        values: `[C, M, H, d]`, in the dtype of `query`.
        chapters: Chapters that each token reads, `[N, n]`, int64.
        scales: Factors of the keys and values of a chapter, `[N, n]`.
        backend: `"torch"` or `"triton"`. Default: `"torch"`.

    Returns:
        `[N, H, d]`.
    """
    segments = sort_by_chapter(chapters, len(keys))
    arguments = block_arguments(query, keys, values, chapters, scales, segments)
    outputs, sums = chapter_blocks_op(*arguments) if backend == "triton" else block_attention(*arguments)
    pair_outputs = outputs.index_select(0, segments.row_of_pair).unflatten(0, chapters.shape)  # [N, n, H, d]
    log_sums = sums.index_select(0, segments.row_of_pair).unflatten(0, chapters.shape)  # [N, n, H]
    weights = log_sums.softmax(dim=1)
    weights = weights * scales.to(weights.dtype).unsqueeze(-1)
    return torch.einsum("tnh,tnhd->thd", weights.to(query.dtype), pair_outputs)


def block_arguments(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor,
    segments: SortedPairs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arguments of `block_attention`, from the arguments of `segment_attention` and its sorted pairs."""
    tokens = segments.pair_of_row // chapters.shape[1]
    # The gradient of an embedding is summed in a fixed order.
    rows = torch.nn.functional.embedding(tokens, query.flatten(1)).unflatten(1, query.shape[1:])  # [R, H, d]
    wide = torch.promote_types(query.dtype, torch.float32)
    row_scales = rows.new_zeros(len(rows), dtype=wide).index_put((segments.row_of_pair,), scales.flatten().to(wide))
    factors = row_scales * (1 / math.sqrt(query.shape[-1]))
    return rows, factors, keys, values, segments.chapter_of_block, segments.block_ends


def block_attention(
    rows: torch.Tensor,
    factors: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapter_of_block: torch.Tensor,
    block_ends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each row to the memory tokens of the chapter of the row's block.

    Args:
        rows: Queries, `[R, H, d]`, block after block.
        factors: Factor of the scores of each row, `[R]`, float32 at least.
        keys: `[C, M, H, d]`.
        values: `[C, M, H, d]`.
        chapter_of_block: Chapter of each block, `[R / BLOCK_ROWS]`, int64.
        block_ends: Number of blocks up to and including each chapter, `[C]`, int64, for the gradients of kernels.

    Returns:
        The outputs `[R, H, d]`, and the logarithm of the sum of the exponentials of scores `[R, H]`, float32 at least.
    """
    blocks = rows.unflatten(0, (-1, BLOCK_ROWS)).transpose(1, 2)  # [blocks, H, BLOCK_ROWS, d]
    block_keys, block_values = (
        torch.nn.functional.embedding(chapter_of_block, table.flatten(1)).unflatten(1, table.shape[1:]).transpose(1, 2)
        for table in (keys, values)
    )  # [blocks, H, M, d]
    scores = blocks @ block_keys.transpose(-1, -2)  # [blocks, H, BLOCK_ROWS, M]
    scores = scores.to(factors.dtype) * factors.view(-1, 1, BLOCK_ROWS, 1)
    log_sums = scores.logsumexp(dim=-1, keepdim=True)
    outputs = (scores - log_sums).exp().to(rows.dtype) @ block_values  # [blocks, H, BLOCK_ROWS, d]
    return outputs.transpose(1, 2).flatten(0, 1), log_sums.squeeze(-1).transpose(1, 2).flatten(0, 1)


def sort_by_chapter(chapters: torch.Tensor, num_chapters: int) -> SortedPairs:
    """Assign a row to every pair of a token and a chapter, so that no block of rows has two chapters.

    The number of rows depends on shapes only, so that nothing waits for the device: it is `N * n`, rounded up to whole
    blocks, plus one block per chapter, or per pair if there are fewer pairs than chapters.

    Args:
        chapters: Chapters that each token reads, `[N, n]`, int64.
        num_chapters: Number of chapters in the memory, C.
    """
    pairs = chapters.numel()
    order = chapters.flatten().argsort(stable=True)  # [N * n]
    sorted_chapters = chapters.flatten()[order]
    counts = torch.zeros(num_chapters, dtype=torch.int64, device=chapters.device)
    counts.scatter_add_(0, sorted_chapters, torch.ones_like(sorted_chapters))
    blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    block_ends = blocks.cumsum(0)  # [C]
    first_rows = (block_ends - blocks) * BLOCK_ROWS
    first_pairs = counts.cumsum(0) - counts
    rank = torch.arange(pairs, device=chapters.device) - first_pairs[sorted_chapters]
    sorted_rows = first_rows[sorted_chapters] + rank  # [N * n]
    num_blocks = -(-pairs // BLOCK_ROWS) + min(num_chapters, pairs)
    pair_of_row = torch.zeros(num_blocks * BLOCK_ROWS, dtype=torch.int64, device=chapters.device)
    pair_of_row[sorted_rows] = order
    row_of_pair = order.new_empty(order.shape)
    row_of_pair[order] = sorted_rows
    block_numbers = torch.arange(num_blocks, device=chapters.device)
    chapter_of_block = torch.searchsorted(block_ends, block_numbers, right=True).clamp(max=num_chapters - 1)
    return SortedPairs(pair_of_row, chapter_of_block, block_ends, row_of_pair)


chapter_blocks_op = custom_op("chapter_blocks")(triton_chapter_blocks)
chapter_gradients_op = custom_op("chapter_blocks_backward")(triton_chapter_gradients)


@chapter_blocks_op.register_fake
def _(rows, factors, keys, values, chapter_of_block, block_ends):  # type: ignore[no-untyped-def]
    return rows.new_empty(rows.shape), rows.new_empty(rows.shape[:2], dtype=torch.float32)


@chapter_gradients_op.register_fake
def _(  # type: ignore[no-untyped-def]
    gradient, sums_gradient, rows, factors, keys, values, chapters, ends, outputs, sums, wants_rows, wants_tables
):
    wanted = ((rows, wants_rows), (factors, wants_rows), (keys, wants_tables), (values, wants_tables))
    return tuple(tensor.new_empty(tensor.shape if wants else 0) for tensor, wants in wanted)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, gradient: torch.Tensor, sums_gradient: torch.Tensor) -> tuple:
    needs = ctx.needs_input_grad[:4]
    wants = (needs[0] or needs[1], needs[2] or needs[3])
    gradients = chapter_gradients_op(gradient, sums_gradient, *ctx.saved_tensors, *wants)
    return *(part if need else None for part, need in zip(gradients, needs, strict=True)), None, None


chapter_blocks_op.register_autograd(_differentiate, setup_context=_save)
