"""Kernels of cross-attention to chapters if every token reads its own chapters: the forward pass.

Pairs of a token and one of its chapters are sorted by chapter. A program takes some pairs of one chapter and one query
head: it reads the queries of the pairs at their addresses, and the chapter's memory tokens a stretch at a time, with an
online softmax. Another kernel merges the outputs of each token's pairs.

Sizes: N tokens, n chapters per token, H query heads, K heads of keys and values; `BP` pairs per program, `BM` memory
tokens per stretch, `DP` the power of two at or above the width of a head, at least 16.
"""

import functools
import math
from typing import NamedTuple

import torch

from midus_hf.ops.dispatch.precision import narrowest_integer
from midus_hf.ops.dispatch.triton import (
    Tile,
    on_device_of,
    power_of_two,
    product,
    product_precision,
    quotient_above,
    tl,
    triton,
)

# Largest width of a head: a tile of 16 wider rows would not fit into shared memory, from which it is multiplied.
_MOST_WIDTH = 256

# Most pairs times query heads: they are numbered by 32-bit integers.
_MOST_ROWS = 1 << 30


# Most pairs per program, and most memory tokens per stretch.
LARGEST_TILE = 64


class Blocks(NamedTuple):
    """Blocks of pairs, one per program and head; all pairs of a block have the same chapter.

    Args:
        chapter_of_block: Chapter of each block, `[blocks]`, int32; C for blocks without pairs. The number of blocks
            depends on shapes only.
        last_blocks: Number of blocks up to and including each chapter, `[C]`, int32.
    """

    chapter_of_block: torch.Tensor
    last_blocks: torch.Tensor


@triton.jit
def pairs_of_block(order, offsets, last_blocks, block, chapter, BP: tl.constexpr):
    """Return the numbers of the pairs [BP] of a block of this chapter, and a mask of the pairs that exist."""
    first, end = tl.load(offsets + chapter), tl.load(offsets + chapter + 1)
    number = tl.cdiv(end - first, BP) - tl.load(last_blocks + chapter) + block  # within its chapter
    index = first + number * BP + tl.arange(0, BP)
    valid = index < end
    return tl.load(order + index, mask=valid, other=0), valid


@triton.jit
def head_rows(rows, row, valid, WIDTH: tl.constexpr, DP: tl.constexpr):
    """Load rows [BP, DP] of a tensor whose rows have WIDTH numbers; 0 for invalid rows and beyond WIDTH."""
    dims = tl.arange(0, DP)
    mask = valid[:, None] & (dims < WIDTH)[None, :]
    return tl.load(rows + row[:, None] * WIDTH + dims[None, :], mask=mask, other=0.0)


@triton.jit
def memory_rows(
    table, chapter, start, kv_head, kv_heads, MEMORY: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Load memory tokens `start` to `start + BM` of a chapter for one head, [BM, DP], from a table [C, M, K, d]."""
    memory = start + tl.arange(0, BM)
    row = (chapter.to(tl.int64) * MEMORY + memory) * kv_heads + kv_head
    return head_rows(table, row, memory < MEMORY, WIDTH, DP)


@triton.jit
def chapter_forward_kernel(
    query, keys, values, scales, order, offsets, last_blocks, chapter_of_block, pair_outputs, pair_sums,
    chapters, chosen, heads, temperature,
    SCALED: tl.constexpr, GROUP: tl.constexpr, MEMORY: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BP: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write the output of each pair [N * n, H, d] and the log-sum-exp of its scores [N * n, H]."""
    block, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    chapter = tl.load(chapter_of_block + block)
    if chapter == chapters:
        return
    pair, valid = pairs_of_block(order, offsets, last_blocks, block, chapter, BP)
    query_rows = head_rows(query, (pair // chosen).to(tl.int64) * heads + head, valid, WIDTH, DP)
    factor = tl.zeros([BP], tl.float32) + temperature
    if SCALED:
        factor *= tl.load(scales + pair, mask=valid, other=0.0)
    highest = tl.full([BP], float("-inf"), tl.float32)
    total = tl.zeros([BP], tl.float32)
    read = tl.zeros([BP, DP], tl.float32)
    for start in range(0, MEMORY, BM):
        key = memory_rows(keys, chapter, start, head // GROUP, heads // GROUP, MEMORY, WIDTH, BM, DP)
        scores = product(query_rows, tl.trans(key), PRECISION) * factor[:, None]  # [BP, BM]
        scores = tl.where((start + tl.arange(0, BM) < MEMORY)[None, :], scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, axis=1))
        shares = tl.exp(scores - above[:, None])
        shrink = tl.exp(highest - above)
        value = memory_rows(values, chapter, start, head // GROUP, heads // GROUP, MEMORY, WIDTH, BM, DP)
        total = total * shrink + tl.sum(shares, axis=1)
        read = read * shrink[:, None] + product(shares, value, PRECISION)
        highest = above
    row = pair.to(tl.int64) * heads + head
    dims = tl.arange(0, DP)
    there = pair_outputs + row[:, None] * WIDTH + dims[None, :]
    mask = valid[:, None] & (dims < WIDTH)[None, :]
    tl.store(there, (read / total[:, None]).to(pair_outputs.dtype.element_ty), mask=mask)
    tl.store(pair_sums + row, highest + tl.log(total), mask=valid)


@triton.jit
def sum_of_pair(pair_sums, biases, pair, head, heads, valid, BIASED: tl.constexpr):
    """Load the log-sum-exp of the scores of pairs, and add the bias of their chapter."""
    log_sum = tl.load(pair_sums + pair * heads + head, mask=valid, other=0.0)
    if BIASED:
        log_sum += tl.load(biases + pair, mask=valid, other=0.0)
    return log_sum


@triton.jit
def chapter_merge_kernel(
    pair_outputs, pair_sums, scales, biases, output, log_sums, rows, chosen, heads,
    SCALED: tl.constexpr, BIASED: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Merge outputs and log-sum-exps of pairs into the output [N, H, d] and log-sum-exp [N, H] of each token.

    A program takes BR rows of a token and a head.
    """
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    valid = row < rows
    first, head = row // heads * chosen, row % heads
    highest = tl.full([BR], float("-inf"), tl.float32)
    for choice in range(chosen):
        highest = tl.maximum(highest, sum_of_pair(pair_sums, biases, first + choice, head, heads, valid, BIASED))
    total = tl.zeros([BR], tl.float32)
    merged = tl.zeros([BR, DP], tl.float32)
    for choice in range(chosen):
        weight = tl.exp(sum_of_pair(pair_sums, biases, first + choice, head, heads, valid, BIASED) - highest)
        total += weight
        if SCALED:
            weight *= tl.load(scales + first + choice, mask=valid, other=0.0)
        part = head_rows(pair_outputs, (first + choice) * heads + head, valid, WIDTH, DP)
        merged += weight[:, None] * part.to(tl.float32)
    dims = tl.arange(0, DP)
    there = output + row[:, None] * WIDTH + dims[None, :]
    mask = valid[:, None] & (dims < WIDTH)[None, :]
    tl.store(there, (merged / total[:, None]).to(output.dtype.element_ty), mask=mask)
    tl.store(log_sums + row, highest + tl.log(total), mask=valid)


class SegmentReading(NamedTuple):
    """Output of attention to chapters, and the intermediate results that the gradient needs.

    Args:
        output: `[N, H, d]`, in the dtype of the query.
        log_sums: Logarithm of the sum of the exponentials of scores, `[N, H]`, float32.
        order: Pairs of a token and a chapter sorted by chapter, `[N * n]`, int32, from `sorted_pairs`.
        offsets: Index of each chapter's first pair in `order`, `[C + 1]`, int32.
    """

    output: torch.Tensor
    log_sums: torch.Tensor
    order: torch.Tensor
    offsets: torch.Tensor


def triton_segments(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chapters: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
) -> SegmentReading:
    """Compute `segment_attention` by kernels, with the same arguments."""
    query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    (tokens, heads, width), (num_chapters, memory_tokens, kv_heads, _) = query.shape, keys.shape
    chosen = chapters.shape[1]
    order, offsets = sorted_pairs(chapters, num_chapters)
    output = torch.empty_like(query)
    log_sums = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    if not query.numel():
        return SegmentReading(output, log_sums, order, offsets)
    pair_outputs = query.new_empty(tokens * chosen, heads, width)
    pair_sums = torch.empty(tokens * chosen, heads, dtype=torch.float32, device=query.device)
    tile = chapter_tile(*chapter_shape(query, len(order), num_chapters, memory_tokens))
    blocks = blocks_of(offsets, len(order), tile["BP"])
    extra = tuple(pair_sums if of_pair is None else of_pair.contiguous() for of_pair in (scales, biases))
    merged_rows = max(1, min(32, 4096 // tile["DP"]))
    with on_device_of(query):
        chapter_forward_kernel[(len(blocks.chapter_of_block) * heads,)](
            query, keys, values, extra[0], order, offsets, blocks.last_blocks, blocks.chapter_of_block,
            pair_outputs, pair_sums, num_chapters, chosen, heads, 1 / math.sqrt(width),
            SCALED=scales is not None, GROUP=heads // kv_heads, MEMORY=memory_tokens, WIDTH=width,
            PRECISION=product_precision(query), **tile,
        )  # fmt: skip
        chapter_merge_kernel[(quotient_above(tokens * heads, merged_rows),)](
            pair_outputs, pair_sums, *extra, output, log_sums, tokens * heads, chosen, heads,
            SCALED=scales is not None, BIASED=biases is not None, WIDTH=width, BR=merged_rows, DP=tile["DP"],
        )  # fmt: skip
    return SegmentReading(output, log_sums, order, offsets)


def segment_refusal(heads: int, width: int, pairs: int) -> str | None:
    """Return why the kernels refuse these sizes, and which they expect; None if they take them."""
    if width > _MOST_WIDTH:
        return f"heads are {width} wide; expected {_MOST_WIDTH} or less"
    if pairs * heads > _MOST_ROWS:
        return f"there are {pairs} pairs of a token and a chapter, with {heads} heads each; expected {_MOST_ROWS} or less together"
    return None


def sorted_pairs(chapters: torch.Tensor, num_chapters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the pairs of a token and a chapter by chapter.

    Args:
        chapters: Chapters that each token reads, `[N, n]`; pair `t * n + j` is token t's with its chapter j.
        num_chapters: Number of chapters in the memory, C.

    Returns:
        The pairs `[N * n]`, int32, by chapter and, within a chapter, by token; and the index of each chapter's first
        pair among them `[C + 1]`, int32.
    """
    narrow = narrowest_integer(num_chapters)
    of_pair, order = chapters.flatten().to(narrow).sort(stable=True)
    edges = torch.arange(num_chapters + 1, dtype=narrow, device=chapters.device)
    return order.to(torch.int32), torch.searchsorted(of_pair, edges, out_int32=True)


def blocks_of(offsets: torch.Tensor, pairs: int, size: int) -> Blocks:
    """Cut the pairs of each chapter into blocks, without waiting for the device.

    Args:
        offsets: Index of each chapter's first pair, `[C + 1]`, from `sorted_pairs`.
        pairs: Number of pairs, N * n.
        size: Most pairs of a block.
    """
    last_blocks = ((offsets.diff() + size - 1) // size).cumsum(0, dtype=torch.int32)
    read = min(len(last_blocks), pairs)
    numbers = torch.arange((pairs - read) // size + read, dtype=torch.int32, device=offsets.device)
    return Blocks(torch.searchsorted(last_blocks, numbers, right=True, out_int32=True), last_blocks)


def chapter_shape(query: torch.Tensor, pairs: int, num_chapters: int, memory_tokens: int) -> tuple[int, int, int, int]:
    """Return the numbers that tiles depend on: DP, bytes per element, expected pairs per chapter and memory tokens per chapter.

    The last two are rounded up to a power of two between 16 and the largest tile.
    """
    dims, element = max(16, power_of_two(query.shape[-1])), query.element_size()
    expected = quotient_above(pairs, num_chapters)
    pairs_of_chapter, tokens = (max(16, min(LARGEST_TILE, power_of_two(size))) for size in (expected, memory_tokens))
    return dims, element, pairs_of_chapter, tokens


@functools.cache
def chapter_tile(dims: int, element: int, pairs: int, memory_tokens: int) -> Tile:
    """Return the sizes of a program: as many pairs as a chapter is expected to have, with tiles of rows up to 16 KB."""
    most = min(LARGEST_TILE, (16 << 10) // (dims * element))
    return {"BP": min(most, pairs), "BM": min(most, memory_tokens), "DP": dims, "num_warps": 4}
