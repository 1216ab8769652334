"""Kernels of attention to the sequence and the depth at once: the gradients, in three launches.

For each row, the first launch computes the numbers that the others need, for the sequence and for the depth: the
logarithm of the divisor of the weights, and the loss, a number that gradients of scores subtract. The second launch
takes tiles of rows, like the forward pass, for the gradients of queries from both parts, and of slots, which no other
program reads. The third launch takes keys of the sequence: a program sums their gradients over the rows of all query
heads of a group. No sums cross programs.

Sizes have the names of `forward.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from benchmarks.fused_depth.forward import (
    MOST_KEYS,
    Read,
    columns_of_slots,
    fused_shape,
    fused_tile,
    of_heads,
    padded_width,
    parts_of_rows,
    programs,
    row_places,
    rows_at,
    store_rows,
)
from midus_hf.ops.depth.triton.forward import last_dense, run_of_table, slot_rows, slot_table
from midus_hf.ops.dispatch.tiles import Changes, Tile, tiles
from midus_hf.ops.dispatch.triton import on_device_of, product, product_precision, tl, triton

# Rows per program of the first launch.
_ROWS_AT_ONCE = 16


class Gradients(NamedTuple):
    """Gradients of attention to sequence and depth, laid out in memory token by token; None or an empty list if not wanted.

    Args:
        query: `[B, H, T, d]`.
        key: Gradient of the sequence's key, `[B, K, T, d]`.
        value: Gradient of the sequence's value, `[B, K, T, d]`.
        keys: Gradient of the key of each of n slots, `[B, K, T, d]`.
        values: Gradient of the value of each slot, `[B, K, T, d]`.
        gate: `[H]`, float32; None without a gate.
    """

    query: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    gate: torch.Tensor | None


@triton.jit
def fused_rows_kernel(
    gradient, output, of_sequence, of_depth, lse, depth_lse, gate,
    divisor, loss, depth_divisor, depth_loss, into_gate,
    rows, heads,
    APART: tl.constexpr, ADDED: tl.constexpr, WIDTH: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Write the logarithms of divisors and the losses of both parts, and gradients of c, [B, T, H] each.

    Without a gate (not APART), only the loss is written, which both parts share.
    """
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    there = row < rows
    upstream = rows_at(gradient, row * WIDTH, there, WIDTH, DP).to(tl.float32)
    if APART:
        along = tl.sum(upstream * rows_at(of_sequence, row * WIDTH, there, WIDTH, DP).to(tl.float32), axis=1)
        along_depth = tl.sum(upstream * rows_at(of_depth, row * WIDTH, there, WIDTH, DP).to(tl.float32), axis=1)
        own_sum = tl.load(lse + row, mask=there, other=0.0)
        depth_sum = tl.load(depth_lse + row, mask=there, other=0.0)
        c = tl.load(gate + row % heads, mask=there, other=0.0)
        left, taken, share = parts_of_rows(own_sum, depth_sum, c, ADDED)
        apart = along_depth - along
        # The change of the loss when a raised score moves weight from one part to the other.
        moved = c * share / (1 + tl.exp(tl.minimum(depth_sum - own_sum, 80.0))) * apart
        tl.store(divisor + row, own_sum - tl.log(left), mask=there)
        tl.store(loss + row, along + moved / left, mask=there)
        tl.store(depth_divisor + row, depth_sum - tl.log(taken), mask=there)
        # The slots of a row that takes nothing of the depth get no gradient from it, whatever is stored here, unless it is NaN.
        tl.store(depth_loss + row, along_depth - moved / tl.where(taken > 0, taken, 1.0), mask=there)
        of_gate = apart * share
        if ADDED:
            of_gate = of_gate - along_depth
        tl.store(into_gate + row, of_gate, mask=there)
    else:
        along = tl.sum(upstream * rows_at(output, row * WIDTH, there, WIDTH, DP).to(tl.float32), axis=1)
        tl.store(loss + row, along, mask=there)


@triton.jit
def fused_query_gradient_kernel(
    gradient, query, key, value, table, divisor, loss, depth_divisor, depth_loss, into_query,
    tokens, kv_heads, texts, slots, runs,
    query_text, query_head, query_token, key_text, key_head, key_token, value_text, value_head, value_token, scaling,
    CAUSAL: tl.constexpr, WANTS_SLOTS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Write gradients of the query [B, T, H, d] and, with WANTS_SLOTS, of each key and value of the depth [B, T, K, d]."""
    program = tl.program_id(0)
    tile = tl.cdiv(tokens, BT) - 1 - program // (texts * kv_heads)
    text = ((program // kv_heads) % texts).to(tl.int64)
    kv_head = (program % kv_heads).to(tl.int64)
    first_token = tile * BT
    token, member, there = row_places(first_token, tokens, BT, GROUP, BM)
    head = kv_head * GROUP + member
    at = text * query_text + head * query_head + token.to(tl.int64) * query_token
    queries = rows_at(query, at, there, WIDTH, DP)
    row = (text * tokens + token) * kv_heads * GROUP + head
    upstream = rows_at(gradient, row * WIDTH, there, WIDTH, DP)
    scale = scaling * 1.4426950408889634
    divides = tl.load(divisor + row, mask=there, other=float("inf")) * 1.4426950408889634
    loses = tl.load(loss + row, mask=there, other=0.0)
    into_queries = tl.zeros([BM, DP], tl.float32)
    key += text * key_text + kv_head * key_head
    value += text * value_text + kv_head * value_head
    near = tl.arange(0, BN)
    for start in range(0, tl.minimum(first_token + BT, tokens) if CAUSAL else tokens, BN):
        position = start + near
        exists = position < tokens
        keys = rows_at(key, position.to(tl.int64) * key_token, exists, WIDTH, DP)
        values = rows_at(value, position.to(tl.int64) * value_token, exists, WIDTH, DP)
        seen = exists[None, :]
        if CAUSAL:
            seen = seen & (position[None, :] <= token[:, None])
        scores = product(queries, tl.trans(keys), PRECISION) * scale  # [BM, BN]
        shares = tl.where(seen, tl.exp2(scores - divides[:, None]), 0.0)
        into_scores = shares * (product(upstream, tl.trans(values), PRECISION) - loses[:, None])
        into_queries += product(into_scores, keys, PRECISION)
    divides = tl.load(depth_divisor + row, mask=there, other=float("inf")) * 1.4426950408889634
    loses = tl.load(depth_loss + row, mask=there, other=0.0)
    keys_at = table + runs * 7
    values_at = keys_at + slots
    row_bytes = WIDTH * query.dtype.element_ty.primitive_bitwidth // 8
    first = 0
    for run in range(runs):
        end = tl.load(table + run * 7).to(tl.int32)
        for start in range(0, (end - first) * BT, BS):
            slot, owner, exists = columns_of_slots(start, first, first_token, tokens, BT, BS)
            exists = exists & (slot < end)
            _, key_offset, value_offset = run_of_table(table + run * 7, text, kv_head, owner.to(tl.int64))
            places, mask = slot_rows(keys_at, slot, exists, key_offset, query, WIDTH, UNIT, DP)
            keys = tl.load(places, mask=mask, other=0.0)
            places, mask = slot_rows(values_at, slot, exists, value_offset, query, WIDTH, UNIT, DP)
            values = tl.load(places, mask=mask, other=0.0)
            scores = product(queries, tl.trans(keys), PRECISION) * scale  # [BM, BS]
            own = exists[None, :] & (owner[None, :] == token[:, None])
            shares = tl.where(own, tl.exp2(scores - divides[:, None]), 0.0)
            into_scores = shares * (product(upstream, tl.trans(values), PRECISION) - loses[:, None])
            into_queries += product(into_scores, keys, PRECISION)
            if WANTS_SLOTS:
                offset = ((text * tokens + owner) * kv_heads + kv_head) * row_bytes
                into_keys = product(tl.trans(into_scores), queries, PRECISION) * scaling  # [BS, DP]
                places, mask = slot_rows(values_at + slots, slot, exists, offset, query, WIDTH, UNIT, DP)
                tl.store(places, into_keys.to(query.dtype.element_ty), mask=mask)
                into_values = product(tl.trans(shares), upstream, PRECISION)
                places, mask = slot_rows(values_at + 2 * slots, slot, exists, offset, query, WIDTH, UNIT, DP)
                tl.store(places, into_values.to(query.dtype.element_ty), mask=mask)
        first = end
    store_rows(into_queries * scaling, into_query, row, there, WIDTH, DP)


@triton.jit
def fused_key_gradient_kernel(
    gradient, query, key, value, divisor, loss, into_key, into_value,
    tokens, kv_heads, texts,
    query_text, query_head, query_token, key_text, key_head, key_token, value_text, value_head, value_token, scaling,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write gradients of keys and values of the sequence [B, T, K, d]."""
    program = tl.program_id(0)
    first_key = program // (texts * kv_heads) * BN  # keys that the most rows read start first
    text = ((program // kv_heads) % texts).to(tl.int64)
    kv_head = (program % kv_heads).to(tl.int64)
    position = first_key + tl.arange(0, BN)
    exists = position < tokens
    key += text * key_text + kv_head * key_head
    value += text * value_text + kv_head * value_head
    keys = rows_at(key, position.to(tl.int64) * key_token, exists, WIDTH, DP)
    values = rows_at(value, position.to(tl.int64) * value_token, exists, WIDTH, DP)
    scale = scaling * 1.4426950408889634
    into_keys = tl.zeros([BN, DP], tl.float32)
    into_values = tl.zeros([BN, DP], tl.float32)
    for first_token in range(first_key if CAUSAL else 0, tokens, BT):
        token, member, there = row_places(first_token, tokens, BT, GROUP, BM)
        head = kv_head * GROUP + member
        at = text * query_text + head * query_head + token.to(tl.int64) * query_token
        queries = rows_at(query, at, there, WIDTH, DP)
        row = (text * tokens + token) * kv_heads * GROUP + head
        upstream = rows_at(gradient, row * WIDTH, there, WIDTH, DP)
        divides = tl.load(divisor + row, mask=there, other=float("inf")) * 1.4426950408889634
        loses = tl.load(loss + row, mask=there, other=0.0)
        scores = product(keys, tl.trans(queries), PRECISION) * scale  # [BN, BM]
        shares = tl.exp2(scores - divides[None, :])
        if CAUSAL:
            shares = tl.where(position[:, None] <= token[None, :], shares, 0.0)
        into_values += product(shares, upstream, PRECISION)
        into_scores = shares * (product(values, tl.trans(upstream), PRECISION) - loses[None, :])
        into_keys += product(into_scores, queries, PRECISION)
    row = (text * tokens + position) * kv_heads + kv_head
    store_rows(into_keys * scaling, into_key, row, exists, WIDTH, DP)
    store_rows(into_values, into_value, row, exists, WIDTH, DP)


def triton_fused_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scaling: float,
    is_causal: bool,
    gate: torch.Tensor | None,
    added: bool,
    read: Read,
    wants_query: bool,
    wants_sequence: bool,
    wants_slots: bool,
) -> Gradients:
    """Return the gradients of `triton_fused_attention`.

    The arguments from `query` to `added` are the arguments of the forward pass.

    Args:
        gradient: Gradient of the loss with respect to the output, `[B, H, T, d]`.
        read: Result of the forward pass, with both parts kept.
        wants_query: Whether the gradient of the query is wanted.
        wants_sequence: Whether the gradients of the sequence's key and value are wanted.
        wants_slots: Whether the gradients of keys and values of the depth are wanted.
    """
    query, key, value = map(last_dense, (query, key, value))
    (texts, heads, tokens, width), kv_heads = query.shape, key.shape[1]
    apart = gate is not None
    gradient, *by_token = (part.transpose(1, 2).contiguous() for part in (gradient.to(query.dtype), *read))
    # For each part the logarithm of the divisor and the loss, then the gradient of c: [B, T, H] each.
    sums = [
        torch.empty(texts, tokens, heads, dtype=torch.float32, device=query.device) for _ in range(5 if apart else 1)
    ]
    of_parts = sums[:4] if apart else [by_token[3], sums[0], by_token[3], sums[0]]
    makes_query = wants_query or wants_slots
    into_query = query.new_empty(texts, tokens, heads, width) if makes_query else None
    into_key, into_value = (
        query.new_empty(texts, tokens, kv_heads, width) if wants_sequence else None for _ in range(2)
    )
    into_keys, into_values = (
        [query.new_empty(texts, tokens, kv_heads, width) for _ in slots] if wants_slots else []
        for slots in (keys, values)
    )
    shape, precision = fused_shape(query, kv_heads, len(keys)), product_precision(query)
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    if query.numel():
        with on_device_of(query):
            rows = texts * tokens * heads
            fused_rows_kernel[(-(-rows // _ROWS_AT_ONCE),)](
                gradient, *by_token, of_heads(query, gate), *of_parts, sums[-1], rows, heads,
                APART=apart, ADDED=added, WIDTH=width, DP=padded_width(query), BR=_ROWS_AT_ONCE,
            )  # fmt: skip
            if into_query is not None:
                table = slot_table(keys, values, into_keys, into_values) if wants_slots else slot_table(keys, values)
                tile = _query_tile(query.device, *shape)
                fused_query_gradient_kernel[(programs(query, kv_heads, tile["BT"]),)](
                    gradient, query, key, value, table.numbers, *of_parts, into_query,
                    tokens, kv_heads, texts, len(keys), table.runs, *strides, scaling,
                    CAUSAL=is_causal, WANTS_SLOTS=wants_slots, UNIT=table.unit, PRECISION=precision, WIDTH=width, **tile,
                )  # fmt: skip
            if into_key is not None:
                tile = _key_tile(query.device, *shape[:3])
                fused_key_gradient_kernel[(-(-tokens // tile["BN"]) * texts * kv_heads,)](
                    gradient, query, key, value, *of_parts[:2], into_key, into_value,
                    tokens, kv_heads, texts, *strides, scaling, CAUSAL=is_causal, PRECISION=precision, WIDTH=width, **tile,
                )  # fmt: skip
    of_query, of_key, of_value = (
        None if into is None else into.transpose(1, 2) for into in (into_query, into_key, into_value)
    )
    of_keys, of_values = ([into.transpose(1, 2) for into in slots] for slots in (into_keys, into_values))
    of_gate = sums[-1].sum((0, 1)) if apart else None
    return Gradients(of_query if wants_query else None, of_key, of_value, of_keys, of_values, of_gate)


@tiles("fused_query_gradient_kernel", BM=(64, 128), BN=(16, MOST_KEYS), num_warps=(2, 8))
def _query_tile(changes: Changes, group: int, dims: int, element: int, slots: int) -> Tile:
    """Return the sizes by the bytes of a row."""
    row_bytes = dims * element
    sizes = (64, 64 if row_bytes <= 128 else 32, 4 if row_bytes <= 256 else 8)
    return fused_tile(changes, *sizes, group, dims, slots)


@tiles("fused_key_gradient_kernel", BM=(64, 128), BN=(16, MOST_KEYS), num_warps=(2, 8))
def _key_tile(changes: Changes, group: int, dims: int, element: int) -> Tile:
    """Return the sizes by the bytes of a row, for a pass that reads no slots."""
    row_bytes = dims * element
    sizes = (64, 64 if row_bytes <= 256 else 32, 4 if row_bytes <= 128 else 8)
    tile = fused_tile(changes, *sizes, group, dims, slots=1)
    del tile["BS"]
    return tile
