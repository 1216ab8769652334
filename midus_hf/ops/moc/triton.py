"""Kernels of attention from blocks of queries to memory tokens of a chapter each, with gradients.

A program takes one block of rows and one query head, and reads the chapter's memory tokens a tile at a time, with an online softmax.
Shares of attention are recomputed for the gradients. One program sums the gradient of a memory token over the blocks of its chapter,
in their order.

Sizes: R rows, C chapters of M memory tokens, H heads; `BP` rows per block, `BM` memory tokens per tile, `DP` the power of two at or
above the width of a head, at least 16.
"""

import torch
from torch import Tensor

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

BLOCK_ROWS = 32  # rows per block: the queries that one matrix product multiplies with the keys of a chapter
# Largest width of a head: a tile of 16 wider rows would not fit into shared memory, from which it is multiplied.
_MAX_WIDTH = 256
# Maximum number of pairs of a token and a chapter times query heads: they are numbered by 32-bit integers.
_MAX_ROWS = 1 << 30
# Maximum memory tokens per tile, and maximum bytes of their keys.
_MAX_TILE = 64
_TILE_BYTES = 16 << 10


@triton.jit
def head_rows(rows, row, valid, WIDTH: tl.constexpr, DP: tl.constexpr):
    """Load rows [*, DP] of a tensor whose rows have WIDTH numbers; 0 for invalid rows and beyond WIDTH."""
    dims = tl.arange(0, DP)
    mask = valid[:, None] & (dims < WIDTH)[None, :]
    return tl.load(rows + row[:, None] * WIDTH + dims[None, :], mask=mask, other=0.0)


@triton.jit
def store_head_rows(tile, rows, row, valid, WIDTH: tl.constexpr, DP: tl.constexpr):
    dims = tl.arange(0, DP)
    mask = valid[:, None] & (dims < WIDTH)[None, :]
    tl.store(rows + row[:, None] * WIDTH + dims[None, :], tile.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def tile_of_memory(chapter, start, head, heads, MEMORY: tl.constexpr, BM: tl.constexpr):
    """Return the rows [BM] of memory tokens from `start` on in a table [C, M, H, d], and a mask."""
    memory = start + tl.arange(0, BM)
    return (chapter * MEMORY + memory) * heads + head, memory < MEMORY


@triton.jit
def chapter_forward_kernel(
    rows, factors, keys, values, chapter_of_block, outputs, sums, heads,
    MEMORY: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BP: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write what each row and head reads [R, H, d], and the log-sum-exp of its scores [R, H]."""
    block, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    chapter = tl.load(chapter_of_block + block)
    index = block.to(tl.int64) * BP + tl.arange(0, BP)
    row, every = index * heads + head, index >= 0
    query = head_rows(rows, row, every, WIDTH, DP)
    factor = tl.load(factors + index)
    highest = tl.full([BP], float("-inf"), tl.float32)
    total = tl.zeros([BP], tl.float32)
    read = tl.zeros([BP, DP], tl.float32)
    for start in range(0, MEMORY, BM):
        memory, there = tile_of_memory(chapter, start, head, heads, MEMORY, BM)
        key, value = head_rows(keys, memory, there, WIDTH, DP), head_rows(values, memory, there, WIDTH, DP)
        scores = product(query, tl.trans(key), PRECISION) * factor[:, None]  # [BP, BM]
        scores = tl.where(there[None, :], scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, axis=1))
        shares = tl.exp(scores - above[:, None])
        shrink = tl.exp(highest - above)
        total = total * shrink + tl.sum(shares, axis=1)
        read = read * shrink[:, None] + product(shares, value, PRECISION)
        highest = above
    store_head_rows(read / total[:, None], outputs, row, every, WIDTH, DP)
    tl.store(sums + row, highest + tl.log(total))


@triton.jit
def chapter_row_gradient_kernel(
    gradient, rows, factors, keys, values, chapter_of_block, sums, means, into_rows, into_factors, heads,
    MEMORY: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BP: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write the gradients of rows [R, H, d], and of factors per row and head [R, H]."""
    block, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    chapter = tl.load(chapter_of_block + block)
    index = block.to(tl.int64) * BP + tl.arange(0, BP)
    row, every = index * heads + head, index >= 0
    query, upstream = head_rows(rows, row, every, WIDTH, DP), head_rows(gradient, row, every, WIDTH, DP)
    factor, log_sum, mean = tl.load(factors + index), tl.load(sums + row), tl.load(means + row)
    into_row = tl.zeros([BP, DP], tl.float32)
    into_factor = tl.zeros([BP], tl.float32)
    for start in range(0, MEMORY, BM):
        memory, there = tile_of_memory(chapter, start, head, heads, MEMORY, BM)
        key, value = head_rows(keys, memory, there, WIDTH, DP), head_rows(values, memory, there, WIDTH, DP)
        products = product(query, tl.trans(key), PRECISION)  # [BP, BM]
        shares = tl.where(there[None, :], tl.exp(products * factor[:, None] - log_sum[:, None]), 0.0)
        into_scores = shares * (product(upstream, tl.trans(value), PRECISION) - mean[:, None])
        into_row += product(into_scores * factor[:, None], key, PRECISION)
        into_factor += tl.sum(into_scores * products, axis=1)
    store_head_rows(into_row, into_rows, row, every, WIDTH, DP)
    tl.store(into_factors + row, into_factor)


@triton.jit
def chapter_table_gradient_kernel(
    gradient, rows, factors, keys, values, block_ends, sums, means, into_keys, into_values, heads,
    MEMORY: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BP: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BM memory tokens of one head of a chapter, summed over its blocks."""
    chapter, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    first = tl.load(block_ends + chapter - 1, mask=chapter > 0, other=0)
    end = tl.load(block_ends + chapter)
    memory, there = tile_of_memory(chapter.to(tl.int64), tl.program_id(1) * BM, head, heads, MEMORY, BM)
    key, value = head_rows(keys, memory, there, WIDTH, DP), head_rows(values, memory, there, WIDTH, DP)
    into_key = tl.zeros([BM, DP], tl.float32)
    into_value = tl.zeros([BM, DP], tl.float32)
    for block in range(first, end):
        index = block * BP + tl.arange(0, BP)
        row, every = index * heads + head, index >= 0
        query, upstream = head_rows(rows, row, every, WIDTH, DP), head_rows(gradient, row, every, WIDTH, DP)
        factor, log_sum, mean = tl.load(factors + index), tl.load(sums + row), tl.load(means + row)
        shares = tl.exp(product(key, tl.trans(query), PRECISION) * factor[None, :] - log_sum[None, :])  # [BM, BP]
        into_value += product(shares, upstream, PRECISION)
        into_scores = shares * (product(value, tl.trans(upstream), PRECISION) - mean[None, :])
        into_key += product(into_scores * factor[None, :], query, PRECISION)
    store_head_rows(into_key, into_keys, memory, there, WIDTH, DP)
    store_head_rows(into_value, into_values, memory, there, WIDTH, DP)


def triton_chapter_blocks(
    rows: Tensor, factors: Tensor, keys: Tensor, values: Tensor, chapter_of_block: Tensor, block_ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `block_attention` by a kernel, with factors in float32 and the same arguments."""
    rows, keys, values = rows.contiguous(), keys.contiguous(), values.contiguous()
    outputs, sums = torch.empty_like(rows), rows.new_empty(rows.shape[:2], dtype=torch.float32)
    if rows.numel():
        with on_device_of(rows):
            chapter_forward_kernel[(len(chapter_of_block) * rows.shape[1],)](
                rows, factors.contiguous(), keys, values, chapter_of_block, outputs, sums, rows.shape[1], **_tile(keys)
            )  # fmt: skip
    return outputs, sums


def triton_chapter_gradients(
    gradient: Tensor,
    sums_gradient: Tensor,
    rows: Tensor,
    factors: Tensor,
    keys: Tensor,
    values: Tensor,
    chapter_of_block: Tensor,
    block_ends: Tensor,
    outputs: Tensor,
    sums: Tensor,
    wants: list[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of rows, factors, keys and values; those that are not needed are None."""
    gradient, rows, keys, values = (tensor.contiguous() for tensor in (gradient, rows, keys, values))
    # Gradient of a score: its share * (<gradient, value> - <gradient, output> + gradient of the log-sum-exp).
    means = (gradient.float() * outputs.float()).sum(-1) - sums_gradient  # [R, H]
    heads, tile = rows.shape[1], _tile(keys)
    inputs = (gradient, rows, factors.contiguous(), keys, values)
    into_rows = into_factors = into_keys = into_values = None
    with on_device_of(rows):
        if any(wants[:2]):
            into_rows, by_head = torch.zeros_like(rows), torch.zeros_like(sums)
            if rows.numel():
                chapter_row_gradient_kernel[(len(chapter_of_block) * heads,)](
                    *inputs, chapter_of_block, sums, means, into_rows, by_head, heads, **tile
                )
            into_factors = by_head.sum(-1)
        if any(wants[2:]):
            into_keys, into_values = torch.zeros_like(keys), torch.zeros_like(values)
            if rows.numel():
                chapter_table_gradient_kernel[(len(keys) * heads, quotient_above(keys.shape[1], tile["BM"]))](
                    *inputs, block_ends, sums, means, into_keys, into_values, heads, **tile
                )
    return into_rows, into_factors, into_keys, into_values


def segment_refusal(heads: int, width: int, pairs: int) -> str | None:
    """Return why the kernels do not support these sizes, and which they expect; None if they do."""
    if width > _MAX_WIDTH:
        return f"heads are {width} wide; expected {_MAX_WIDTH} or less"
    if pairs * heads > _MAX_ROWS:
        return f"there are {pairs} pairs of a token and a chapter, with {heads} heads each; expected {_MAX_ROWS} or less together"
    return None


def _tile(keys: Tensor) -> Tile:
    """Return the constants of all kernels: more warps for wide rows, whose sums registers hold."""
    (_, memory_tokens, _, width), element = keys.shape, keys.element_size()
    dims = max(16, power_of_two(width))
    tile = min(_MAX_TILE, power_of_two(memory_tokens), _TILE_BYTES // (dims * element))
    return {
        "MEMORY": memory_tokens,
        "WIDTH": width,
        "PRECISION": product_precision(keys),
        "BP": BLOCK_ROWS,
        "BM": max(16, tile),
        "DP": dims,
        "num_warps": 8 if dims * element > 128 else 4,
    }
