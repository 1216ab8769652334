"""Kernels of cross-attention to chapters if every token reads its own chapters: the gradients.

Shares of attention are computed again from the log-sum-exp of each token. No two programs add to the same gradient. The
gradient of a query is summed over its pairs. The gradient of a memory token is summed over the pairs of its chapter, in
the order of the tokens; the pairs of a chapter with many are split, and the sums of the splits are added in their
order.

Sizes have the names of `forward.py`.
"""

import math

import torch

from midus_hf.ops.chapters.triton.forward import (
    SegmentReading,
    blocks_of,
    chapter_shape,
    chapter_tile,
    head_rows,
    memory_rows,
    pairs_of_block,
)
from midus_hf.ops.dispatch.triton import Tile, on_device_of, product, product_precision, quotient_above, tl, triton

# Least number of pairs per split of a chapter, which one program sums.
_FEWEST_OF_SPLIT = 512

# Number of programs that splitting a pass over all pairs aims for. Each split of a chapter has separate partial sums.
_SPLIT_PROGRAMS = 2048


@triton.jit
def chapter_products_kernel(
    gradient, output, products, rows, WIDTH: tl.constexpr, BR: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Write `<gradient, output>` of each token and head, [N * H]: the mean gradient of its shares, weighted by the shares."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    upstream = head_rows(gradient, row, row < rows, WIDTH, DP).to(tl.float32)
    read = head_rows(output, row, row < rows, WIDTH, DP).to(tl.float32)
    tl.store(products + row, tl.sum(upstream * read, axis=1), mask=row < rows)


@triton.jit
def weights_of_pairs(
    scales, biases, log_sums, products, pair, row, valid, SCALED: tl.constexpr, BIASED: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """Return three numbers per pair [BP]: scale, summand that turns scores into logarithms of shares, mean gradient of shares."""
    scale = tl.full([BP], 1.0, tl.float32)
    if SCALED:
        scale = tl.load(scales + pair, mask=valid, other=0.0)
    shift = -tl.load(log_sums + row, mask=valid, other=float("inf"))  # makes shares of missing pairs zero
    if BIASED:
        shift += tl.load(biases + pair, mask=valid, other=0.0)
    return scale, shift, tl.load(products + row, mask=valid, other=0.0)


@triton.jit
def chapter_pair_gradient_kernel(
    gradient, query, keys, values, scales, biases, log_sums, products, order, offsets, last_blocks, chapter_of_block,
    into_queries, into_scales, into_biases,
    chapters, chosen, heads, temperature,
    SCALED: tl.constexpr, BIASED: tl.constexpr, GROUP: tl.constexpr, MEMORY: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the query per pair [N * n, H, d], and of scales and biases, if any, per pair and head [N * n, H]."""
    block, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    chapter = tl.load(chapter_of_block + block)
    if chapter == chapters:
        return
    pair, valid = pairs_of_block(order, offsets, last_blocks, block, chapter, BP)
    row = (pair // chosen).to(tl.int64) * heads + head
    query_rows = head_rows(query, row, valid, WIDTH, DP)
    upstream = head_rows(gradient, row, valid, WIDTH, DP)
    scale, shift, mean = weights_of_pairs(scales, biases, log_sums, products, pair, row, valid, SCALED, BIASED, BP)
    into_query = tl.zeros([BP, DP], tl.float32)
    into_scale = tl.zeros([BP], tl.float32)
    into_bias = tl.zeros([BP], tl.float32)
    for start in range(0, MEMORY, BM):
        key = memory_rows(keys, chapter, start, head // GROUP, heads // GROUP, MEMORY, WIDTH, BM, DP)
        value = memory_rows(values, chapter, start, head // GROUP, heads // GROUP, MEMORY, WIDTH, BM, DP)
        unscaled = product(query_rows, tl.trans(key), PRECISION) * temperature  # [BP, BM]
        shares = tl.exp(unscaled * scale[:, None] + shift[:, None])
        shares = tl.where((start + tl.arange(0, BM) < MEMORY)[None, :], shares, 0.0)
        into_shares = product(upstream, tl.trans(value), PRECISION)
        into_scores = shares * (into_shares * scale[:, None] - mean[:, None])
        into_query += product(into_scores * scale[:, None], key, PRECISION)
        if SCALED:
            into_scale += tl.sum(into_scores * unscaled + shares * into_shares, axis=1)
        if BIASED:
            into_bias += tl.sum(into_scores, axis=1)
    row_of_pair = pair.to(tl.int64) * heads + head
    dims = tl.arange(0, DP)
    there = into_queries + row_of_pair[:, None] * WIDTH + dims[None, :]
    mask = valid[:, None] & (dims < WIDTH)[None, :]
    tl.store(there, (into_query * temperature).to(into_queries.dtype.element_ty), mask=mask)
    if SCALED:
        tl.store(into_scales + row_of_pair, into_scale, mask=valid)
    if BIASED:
        tl.store(into_biases + row_of_pair, into_bias, mask=valid)


@triton.jit
def splits_of_chapter(offsets, chapter, size):
    """Return a chapter's first slot for partial sums, and its number of splits.

    Slots of chapters with two splits or more do not overlap.
    """
    first, end = tl.load(offsets + chapter), tl.load(offsets + chapter + 1)
    return first // size * 2, tl.cdiv(end - first, size)


@triton.jit
def chapter_table_gradient_kernel(
    gradient, query, keys, values, scales, biases, log_sums, products, order, offsets, last_blocks, chapter_of_block,
    into_keys, into_values, partial,
    chapters, chosen, heads, temperature, size,
    SCALED: tl.constexpr, BIASED: tl.constexpr, GROUP: tl.constexpr, MEMORY: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BM memory tokens of one head, summed over a split of the pairs of their chapter.

    If the chapter has one split, they are written to the tables [C, M, K, d], else, in float32, to `partial`
    [slots, 2, M, K, d].
    """
    kv_heads = heads // GROUP
    block, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    start = tl.program_id(1) * BM
    chapter = tl.load(chapter_of_block + block)
    if chapter == chapters:
        return
    slot, splits = splits_of_chapter(offsets, chapter, size)
    split = splits - tl.load(last_blocks + chapter) + block
    first = tl.load(offsets + chapter) + split * size
    end = tl.minimum(first + size, tl.load(offsets + chapter + 1))
    key = memory_rows(keys, chapter, start, kv_head, kv_heads, MEMORY, WIDTH, BM, DP)
    value = memory_rows(values, chapter, start, kv_head, kv_heads, MEMORY, WIDTH, BM, DP)
    into_key = tl.zeros([BM, DP], tl.float32)
    into_value = tl.zeros([BM, DP], tl.float32)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        for stretch in range(first, end, BP):
            index = stretch + tl.arange(0, BP)
            valid = index < end
            pair = tl.load(order + index, mask=valid, other=0)
            row = (pair // chosen).to(tl.int64) * heads + head
            query_rows = head_rows(query, row, valid, WIDTH, DP)
            upstream = head_rows(gradient, row, valid, WIDTH, DP)
            scale, shift, mean = weights_of_pairs(
                scales, biases, log_sums, products, pair, row, valid, SCALED, BIASED, BP
            )
            unscaled = product(key, tl.trans(query_rows), PRECISION) * temperature  # [BM, BP]
            shares = tl.exp(unscaled * scale[None, :] + shift[None, :])
            into_value += product(shares * scale[None, :], upstream, PRECISION)
            into_shares = product(value, tl.trans(upstream), PRECISION)
            into_scores = shares * (into_shares * scale[None, :] - mean[None, :])
            into_key += product(into_scores * scale[None, :], query_rows, PRECISION)
    into_key *= temperature
    memory, dims = start + tl.arange(0, BM), tl.arange(0, DP)
    mask = (memory < MEMORY)[:, None] & (dims < WIDTH)[None, :]
    within = (memory * kv_heads + kv_head)[:, None] * WIDTH + dims[None, :]
    table = MEMORY * kv_heads * WIDTH
    if splits == 1:
        there = chapter.to(tl.int64) * table + within
        tl.store(into_keys + there, into_key.to(into_keys.dtype.element_ty), mask=mask)
        tl.store(into_values + there, into_value.to(into_values.dtype.element_ty), mask=mask)
    else:
        there = (slot + split).to(tl.int64) * 2 * table + within
        tl.store(partial + there, into_key, mask=mask)
        tl.store(partial + there + table, into_value, mask=mask)


@triton.jit
def chapter_split_sums_kernel(
    partial, offsets, into_keys, into_values, table, size, BV: tl.constexpr
):  # fmt: skip
    """Sum BV elements of both gradient tables over the splits of a chapter, in their order; do nothing for a single split."""
    chapter = tl.program_id(0)
    slot, splits = splits_of_chapter(offsets, chapter, size)
    if splits <= 1:
        return
    element = tl.program_id(1) * BV + tl.arange(0, BV)
    mask = element < table
    keys = tl.zeros([BV], tl.float32)
    values = tl.zeros([BV], tl.float32)
    for split in range(splits):
        there = partial + (slot + split).to(tl.int64) * 2 * table + element
        keys += tl.load(there, mask=mask, other=0.0)
        values += tl.load(there + table, mask=mask, other=0.0)
    there = chapter.to(tl.int64) * table + element
    tl.store(into_keys + there, keys.to(into_keys.dtype.element_ty), mask=mask)
    tl.store(into_values + there, values.to(into_values.dtype.element_ty), mask=mask)


def triton_segment_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    weighing: tuple[torch.Tensor | None, torch.Tensor | None],
    reading: SegmentReading,
    wants_rows: bool,
    wants_tables: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients of query, keys, values, scales and biases, with None for tensors that are missing or not wanted.

    Args:
        gradient: Gradient of the loss with respect to the output, `[N, H, d]`.
        query: Query of the forward pass, `[N, H, d]`.
        keys: Keys of the forward pass, `[C, M, K, d]`.
        values: Values of the forward pass, `[C, M, K, d]`.
        weighing: Scales and biases, `[N, n]` each, or None.
        reading: Result of the forward pass.
        wants_rows: Whether gradients of query, scales and biases are wanted.
        wants_tables: Whether gradients of keys and values are wanted.
    """
    (scales, biases), (output, log_sums, order, offsets) = weighing, reading
    gradient, query, keys, values = (tensor.contiguous() for tensor in (gradient, query, keys, values))
    (tokens, heads, width), (num_chapters, memory_tokens, kv_heads, _) = query.shape, keys.shape
    scaled, biased = scales is not None, biases is not None
    chosen = len(order) // max(1, tokens)
    products = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    shape = chapter_shape(query, len(order), num_chapters, memory_tokens)
    tile = _tile(*shape)
    extra = tuple(products if of_pair is None else of_pair.contiguous() for of_pair in (scales, biases))
    inputs = (gradient, query, keys, values, *extra, log_sums, products, order, offsets)
    numbers = (num_chapters, chosen, heads, 1 / math.sqrt(width))
    constants = {
        "SCALED": scaled,
        "BIASED": biased,
        "GROUP": heads // kv_heads,
        "MEMORY": memory_tokens,
        "WIDTH": width,
        "PRECISION": product_precision(query),
    }
    rows = max(1, min(32, 4096 // tile["DP"]))
    into_query = into_scales = into_biases = into_keys = into_values = None
    with on_device_of(query):
        chapter_products_kernel[(quotient_above(tokens * heads, rows),)](
            gradient, output, products, tokens * heads, WIDTH=width, BR=rows, DP=tile["DP"]
        )
        if wants_rows:
            by_pair = query.new_empty(tokens, chosen, heads, width)
            sums = [
                torch.empty(tokens, chosen, heads, dtype=torch.float32, device=query.device) if there else products
                for there in (scaled, biased)
            ]
            blocks = blocks_of(offsets, len(order), tile["BP"])
            chapter_pair_gradient_kernel[(len(blocks.chapter_of_block) * heads,)](
                *inputs,
                blocks.last_blocks,
                blocks.chapter_of_block,
                by_pair,
                *sums,
                *numbers,
                **constants,
                **tile,
            )
            into_query = by_pair.sum(1)
            into_scales, into_biases = (
                of_head.sum(-1) if there else None for of_head, there in zip(sums, (scaled, biased), strict=True)
            )
        if wants_tables:
            into_keys, into_values = torch.zeros_like(keys), torch.zeros_like(values)
            stretches, table = quotient_above(memory_tokens, tile["BM"]), keys[0].numel()
            size = _pairs_of_split(len(order), kv_heads * stretches)
            slots = len(order) // size * 2
            partial = torch.empty(slots, 2, table, dtype=torch.float32, device=query.device)
            splits = blocks_of(offsets, len(order), size)
            chapter_table_gradient_kernel[(len(splits.chapter_of_block) * kv_heads, stretches)](
                *inputs, splits.last_blocks, splits.chapter_of_block, into_keys, into_values, partial,
                *numbers, size, **constants, **tile,
            )  # fmt: skip
            if slots:
                chapter_split_sums_kernel[(num_chapters, quotient_above(table, 1024))](
                    partial, offsets, into_keys, into_values, table, size, BV=1024
                )
    return into_query, into_keys, into_values, into_scales, into_biases


def _tile(dims: int, element: int, pairs: int, memory_tokens: int) -> Tile:
    """Return the tile of the forward pass, with 8 warps for wide rows: registers hold two sums of rows and their terms."""
    return chapter_tile(dims, element, pairs, memory_tokens) | {"num_warps": 8 if dims * element > 128 else 4}


def _pairs_of_split(pairs: int, programs: int) -> int:
    """Return how many pairs a split has, a multiple of any tile, if each split takes `programs` programs."""
    splits = max(1, _SPLIT_PROGRAMS // programs)
    return max(_FEWEST_OF_SPLIT, -(-pairs // (splits * 64)) * 64)
