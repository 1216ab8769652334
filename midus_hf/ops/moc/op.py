"""Cross-attention from tokens to the chapters of a memory that are chosen for them.

Tokens that read different chapters give pairs of a token and a chapter, which are sorted by chapter.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from midus_hf.ops.dispatch.calling import differentiable_op, resolve, wide_dtype, without_autocast
from midus_hf.ops.moc.triton import BLOCK_ROWS, segment_refusal, triton_chapter_blocks, triton_chapter_gradients

_MAX_GATHERED = 1 << 25  # largest number of elements of keys that are gathered at a time: 128 MB in float32
# Minimum number of queries with the same chapters for which gathering keys is faster than sorting tokens by chapter.
_MIN_TOGETHER = 16


def reference_chapter_attention(
    query: Tensor, keys: Tensor, values: Tensor, chapters: Tensor, scales: Tensor
) -> Tensor:
    """Attend to the memory tokens of chosen chapters in one softmax (Mixture of Chapters, equation 4).

    Shapes: query and result `[S, Q, H, d]`, keys and values `[C, M, H, d]`, chapters and scales `[S, n]`.
    """
    score_dtype = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query.device.type):
        # [S, n, M, H, d]; widened before indexing, so that gradients of segments with the same chapter are summed in float32.
        keys, values = (tensor.to(query.dtype).to(score_dtype)[chapters] for tensor in (keys, values))
        scale = scales.to(score_dtype)[:, :, None, None, None]
        keys, values = keys * scale, values * scale
        scores = torch.einsum("sqhd,snmhd->shqnm", query.to(score_dtype), keys) / math.sqrt(query.shape[-1])
        weights = scores.flatten(-2).softmax(dim=-1).unflatten(-1, scores.shape[-2:])
        output = torch.einsum("shqnm,snmhd->sqhd", weights, values)
    return output.to(query.dtype)


def chapter_attention(
    query: Tensor, keys: Tensor, values: Tensor, chapters: Tensor, scales: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Attend to the memory tokens of chosen chapters in one softmax (Mixture of Chapters, equation 4).

    All Q tokens of a segment read the same n chapters: with Q = 1 each token has its own. There is no position and no mask.

    Scores are accumulated in float32 at least. For long segments, the keys of some segments at a time are gathered, again in the
    backward pass, and torch's attention computes this on every backend except the reference. For short segments, tokens are sorted by
    chapter: the keys of a chapter are multiplied with all of its tokens at once, and no tensor holds keys per token. Under
    `"triton"`, kernels compute this, in the same order at every run.

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
        ValueError: If shapes disagree, or if `"triton"` is chosen for tokens that must be sorted, and heads are wider than 256 or
            there are more than 2^30 pairs of a token and a chapter, counted once per head.
    """
    _check_shapes(query, keys, values, chapters, scales)
    segments, length, heads, width = query.shape
    sorts = length < _MIN_TOGETHER and segments > 1
    refusal = segment_refusal(heads, width, chapters.numel() * length) if sorts else None
    body = resolve(backend, query, refusal)
    if query.numel() == 0:
        return query * 1
    if body == "reference":
        return reference_chapter_attention(query, keys, values, chapters, scales)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    with without_autocast(query.device.type):
        if not sorts:
            return _gathered(query, keys, values, chapters, scales)
        of_tokens = (tensor.repeat_interleave(length, dim=0) for tensor in (chapters, scales))  # [S * Q, n] each
        output = segment_attention(query.flatten(0, 1), keys, values, *of_tokens, backend=body)
        return output.unflatten(0, (segments, length))


def min_together() -> int:
    """Return the minimum number of queries with the same chapters for which keys are gathered."""
    return _MIN_TOGETHER


def _gathered(query: Tensor, keys: Tensor, values: Tensor, chapters: Tensor, scales: Tensor) -> Tensor:
    """Compute `chapter_attention` of segments with torch's attention, some segments at a time."""
    per_segment = chapters.shape[1] * keys[0].numel()
    together = max(1, _MAX_GATHERED // per_segment)
    parts = list(zip(*(tensor.split(together) for tensor in (query, chapters, scales)), strict=True))
    outputs = []
    for part, chosen, scale in parts:
        arguments = (part, keys, values, chosen, scale)
        if len(parts) == 1 or not torch.is_grad_enabled():
            outputs.append(_attend_at_once(*arguments))
        else:
            outputs.append(checkpoint(_attend_at_once, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs)


def _attend_at_once(query: Tensor, keys: Tensor, values: Tensor, chapters: Tensor, scales: Tensor) -> Tensor:
    num_segments, num_chosen = chapters.shape
    scale = scales.to(query.dtype).unsqueeze(-1)
    shape = (num_segments, num_chosen * keys.shape[1], *keys.shape[2:])
    # [S, H, n * M, d]
    chosen_keys, chosen_values = (
        (F.embedding(chapters, table.flatten(1)) * scale).view(shape).transpose(1, 2) for table in (keys, values)
    )
    output = F.scaled_dot_product_attention(query.transpose(1, 2), chosen_keys, chosen_values)
    return output.transpose(1, 2)  # [S, Q, H, d]


def _check_shapes(query: Tensor, keys: Tensor, values: Tensor, chapters: Tensor, scales: Tensor) -> None:
    """Refuse tensors of `chapter_attention` whose shapes do not fit together."""
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


class SortedPairs(NamedTuple):
    """Pairs of a token and a chapter, padded so that each block of rows has one chapter; all int64."""

    pair_of_row: Tensor  # [R], 0 for padding
    chapter_of_block: Tensor  # [R / BLOCK_ROWS]
    block_ends: Tensor  # [C], the number of blocks up to and including each chapter
    row_of_pair: Tensor  # [N * n]


def segment_attention(
    query: Tensor, keys: Tensor, values: Tensor, chapters: Tensor, scales: Tensor, *, backend: str
) -> Tensor:
    """Attend from tokens, query `[N, H, d]`, to memory tokens of their chapters `[N, n]`, in one softmax.

    Outputs of a token's pairs are weighted by the softmax over their log-sum-exps, which equals one softmax over all memory tokens.
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
    query: Tensor, keys: Tensor, values: Tensor, chapters: Tensor, scales: Tensor, segments: SortedPairs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of `block_attention`, from those of `segment_attention` and its sorted pairs."""
    tokens = segments.pair_of_row // chapters.shape[1]
    # The gradient of an embedding is summed in a fixed order.
    rows = F.embedding(tokens, query.flatten(1)).unflatten(1, query.shape[1:])  # [R, H, d]
    wide = wide_dtype(query)
    row_scales = rows.new_zeros(len(rows), dtype=wide).index_put((segments.row_of_pair,), scales.flatten().to(wide))
    factors = row_scales * (1 / math.sqrt(query.shape[-1]))
    return rows, factors, keys, values, segments.chapter_of_block, segments.block_ends


def block_attention(
    rows: Tensor, factors: Tensor, keys: Tensor, values: Tensor, chapter_of_block: Tensor, block_ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend from each row `[R, H, d]` to the memory tokens of the chapter of the row's block.

    `factors` `[R]` multiply the scores of each row; the gradients of kernels need `block_ends`. Returns the outputs `[R, H, d]`, and
    the logarithm of the sum of the exponentials of scores `[R, H]`, float32 at least.
    """
    blocks = rows.unflatten(0, (-1, BLOCK_ROWS)).transpose(1, 2)  # [blocks, H, BLOCK_ROWS, d]
    # [blocks, H, M, d]
    block_keys, block_values = (
        F.embedding(chapter_of_block, table.flatten(1)).unflatten(1, table.shape[1:]).transpose(1, 2)
        for table in (keys, values)
    )
    scores = blocks @ block_keys.transpose(-1, -2)  # [blocks, H, BLOCK_ROWS, M]
    scores = scores.to(factors.dtype) * factors.view(-1, 1, BLOCK_ROWS, 1)
    log_sums = scores.logsumexp(dim=-1, keepdim=True)
    outputs = (scores - log_sums).exp().to(rows.dtype) @ block_values  # [blocks, H, BLOCK_ROWS, d]
    return outputs.transpose(1, 2).flatten(0, 1), log_sums.squeeze(-1).transpose(1, 2).flatten(0, 1)


def sort_by_chapter(chapters: Tensor, num_chapters: int) -> SortedPairs:
    """Assign a row to every pair of a token and a chapter, so that no block of rows has two chapters.

    The number of rows depends on shapes only, so nothing waits for the device: `N * n`, rounded up to whole blocks, plus one block
    per chapter, or per pair if there are fewer pairs than chapters.
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


chapter_blocks_op = differentiable_op(
    "chapter_blocks",
    triton_chapter_blocks,
    triton_chapter_gradients,
    lambda rows, *_: (rows.new_empty(rows.shape), rows.new_empty(rows.shape[:2], dtype=torch.float32)),
    gradients=("rows", "factors", "keys", "values"),
    outputs=("outputs", "sums"),
)
