"""Kernel of attention to the depth: all gradients, in one launch.

Only one program, that of its token and head, reads a row of a slot. So the gradient of the row is written once, and no
sums cross programs. Shares are computed again from the log-sum-exp.

Sizes have the names of `forward.py`.
"""

from functools import partial

import torch

from midus_hf.ops.depth.inputs import DepthInputs, DepthReading, Wanted
from midus_hf.ops.depth.triton.forward import (
    capped,
    depth_shape,
    depth_tile,
    group_tile,
    last_dense,
    program_place,
    run_of_table,
    slot_rows,
    slot_table,
    store_group_tile,
)
from midus_hf.ops.dispatch.tiles import tiles
from midus_hf.ops.dispatch.triton import on_device_of, product, product_precision, tl, triton

# Bytes of the slots that are read at once: with twice as many, a thread takes up to 255 registers, and few programs
# run together.
_TILE_BYTES = 4 << 10

_tile = tiles("depth_gradient_kernel", BS=(16, 64), num_warps=(1, 8))(partial(depth_tile, tile_bytes=_TILE_BYTES))


@triton.jit
def depth_gradient_kernel(
    gradient, lse_gradient, query, output, lse, table, into_query,
    tokens, kv_heads, slots, runs, text_stride, head_stride, token_stride, scaling, softcap,
    WANTS_QUERY: tl.constexpr, WANTS_SLOTS: tl.constexpr, CAPPED: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the query [B, T, H, d], and of each key and value [B, T, K, d]."""
    text, token, kv_head = program_place(tokens, kv_heads)
    head = kv_head * GROUP
    queries = group_tile(
        query, text * text_stride + token * token_stride + head * head_stride, head_stride, GROUP, WIDTH, GP, DP
    )
    row = (text * tokens + token) * kv_heads * GROUP + head
    upstream = group_tile(gradient, row * WIDTH, WIDTH, GROUP, WIDTH, GP, DP)
    read = group_tile(output, row * WIDTH, WIDTH, GROUP, WIDTH, GP, DP)
    members = tl.arange(0, GP)
    log_sum = tl.load(
        lse + row + members, mask=members < GROUP, other=float("inf")
    )  # makes shares of padding heads zero
    # Gradient of a score: its share * (<gradient, value> - <gradient, output> + gradient of the log-sum-exp).
    mean = tl.sum(upstream.to(tl.float32) * read.to(tl.float32), axis=1)
    mean -= tl.load(lse_gradient + row + members, mask=members < GROUP, other=0.0)
    keys = table + runs * 7
    values = keys + slots
    into_keys = values + slots
    into_values = into_keys + slots
    row_bytes = WIDTH * query.dtype.element_ty.primitive_bitwidth // 8
    into_offset = ((text * tokens + token) * kv_heads + kv_head) * row_bytes
    into_asked = tl.zeros([GP, DP], tl.float32)
    first = 0
    for run in range(runs):
        end, key_offset, value_offset = run_of_table(table + run * 7, text, kv_head, token)
        for start in range(first, end, BS):
            slot = start + tl.arange(0, BS)
            there = slot < end
            rows, mask = slot_rows(keys, slot, there, key_offset, query, WIDTH, UNIT, DP)
            key = tl.load(rows, mask=mask, other=0.0)
            rows, mask = slot_rows(values, slot, there, value_offset, query, WIDTH, UNIT, DP)
            value = tl.load(rows, mask=mask, other=0.0)
            scores = product(queries, tl.trans(key), PRECISION) * scaling  # [GP, BS]
            slopes = scaling
            if CAPPED:
                scores = capped(scores, softcap)
                slopes = scaling * (1 - (scores / softcap) * (scores / softcap))
            shares = tl.where(there[None, :], tl.exp(scores - log_sum[:, None]), 0.0)
            into_shares = product(upstream, tl.trans(value), PRECISION)
            into_scores = shares * (into_shares - mean[:, None]) * slopes
            if WANTS_QUERY:
                into_asked += product(into_scores, key, PRECISION)
            if WANTS_SLOTS:
                into_key = product(tl.trans(into_scores), queries, PRECISION)  # [BS, DP]
                rows, mask = slot_rows(into_keys, slot, there, into_offset, query, WIDTH, UNIT, DP)
                tl.store(rows, into_key.to(query.dtype.element_ty), mask=mask)
                into_value = product(tl.trans(shares), upstream, PRECISION)
                rows, mask = slot_rows(into_values, slot, there, into_offset, query, WIDTH, UNIT, DP)
                tl.store(rows, into_value.to(query.dtype.element_ty), mask=mask)
        first = end
    if WANTS_QUERY:
        store_group_tile(into_asked, into_query, row * WIDTH, GROUP, WIDTH, GP, DP)


def triton_depth_gradients(
    inputs: DepthInputs, reading: DepthReading, gradient: DepthReading, wanted: Wanted
) -> list[torch.Tensor]:
    """Return gradients as `native_gradients` does, laid out in memory token by token."""
    query, keys, values, scaling, softcap = inputs
    query = last_dense(query)
    (texts, heads, tokens, width), kv_heads = query.shape, keys[0].shape[1]
    parts = (gradient.output.to(query.dtype), gradient.lse.float(), *reading)
    by_token = [tensor.transpose(1, 2).contiguous() for tensor in parts]
    into_query = query.new_empty(texts, tokens, heads, width) if wanted.query else None
    into_keys, into_values = (
        [query.new_empty(texts, tokens, kv_heads, width) for _ in slots] if wanted.slots else []
        for slots in (keys, values)
    )
    if query.numel() and any(wanted):
        table = slot_table(keys, values, into_keys, into_values) if wanted.slots else slot_table(keys, values)
        with on_device_of(query):
            depth_gradient_kernel[(texts * tokens * kv_heads,)](
                by_token[0], by_token[1], query, by_token[2], by_token[3], table.numbers,
                query if into_query is None else into_query,
                tokens, kv_heads, len(keys), table.runs, *query.stride()[:3], scaling, softcap or 1.0,
                WANTS_QUERY=wanted.query, WANTS_SLOTS=wanted.slots, CAPPED=softcap is not None, UNIT=table.unit,
                PRECISION=product_precision(query), GROUP=heads // kv_heads, WIDTH=width,
                **_tile(query.device, *depth_shape(query, kv_heads, len(keys))),
            )  # fmt: skip
    into_slots = [into.transpose(1, 2) for into in (*into_keys, *into_values)]
    return [query.new_empty(0) if into_query is None else into_query.transpose(1, 2), *into_slots]
