"""Attention to the sequence and the depth by one kernel, an alternative to the package's own that is timed beside it.

A program takes a tile of rows: the query heads that share one head of keys and values, for some whole tokens, token
after token. The rows are multiplied with the keys of the sequence, block by block, then with the slots of all tokens of
the tile; a mask leaves each row the slots of its token. So the keys and slots that a group shares are loaded once, any
number of heads may share them, and no program reads another program's slots. Sequence and depth share one online
softmax. Inside the kernels, exponentials are powers of two; the sums that they write are natural logarithms.

Gradients take three launches. The first computes the loss of each row, a number that gradients of its scores subtract.
The second takes tiles of rows, for the gradients of queries, and of slots, which no other program reads. The third takes
keys of the sequence: a program sums their gradients over the rows of all query heads of a group. No sums cross programs.

As in other attention kernels, a non-finite number also spoils the outputs of other rows of its tile.

Sizes: B texts, H query heads, K heads of keys and values, T tokens, n slots, R runs of slots; `BM` rows per tile, H / K
for each of `BT` whole tokens; `BN` keys of the sequence, and `BS` rows of slots, that are read at once; `DP` the power
of two at or above the width of a head. Results lie in memory token by token, `[B, T, H, d]`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from midus_hf.ops.depth.triton.forward import last_dense, run_of_table, slot_rows, slot_table
from midus_hf.ops.dispatch.choices import resolve
from midus_hf.ops.dispatch.tiles import Changes, Tile, tiles
from midus_hf.ops.dispatch.triton import on_device_of, power_of_two, product, product_precision, tl, triton

# Most keys of the sequence that are read at once.
_MOST_KEYS = 128
# Most query heads per head of keys and values: a tile of rows holds all of them.
_MOST_GROUP = 64
# Rows per program of the first launch of gradients.
_ROWS_AT_ONCE = 16


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Attend to the earlier tokens of the sequence and to the slots of the depth in one softmax; gradients flow to every tensor.

    Args:
        query: `[B, H, T, d]`, bfloat16 or float16, on a GPU.
        key: Key of the sequence, `[B, K, T, d]`; K divides H, and query head h reads head h // (H / K).
        value: Value of the sequence, `[B, K, T, d]`.
        keys: Key of each of n slots, `[B, K, T, d]`; n is 1 or more.
        values: Value of each slot, `[B, K, T, d]`.

    Returns:
        `[B, H, T, d]`.

    Raises:
        ValueError: If kernels cannot run, or do not take these tensors.
    """
    group = query.shape[1] // key.shape[1]
    refusal = None
    if group > _MOST_GROUP:
        refusal = f"{group} query heads read each head of keys; expected {_MOST_GROUP} or fewer"
    elif query.dtype not in (torch.bfloat16, torch.float16):
        refusal = f"heads are {query.dtype}; expected bfloat16 or float16"
    if refusal is not None:
        raise ValueError(f"one kernel cannot read sequence and depth: {refusal}.")
    resolve("triton", query)
    return FusedAttention.apply(query, key, value, *keys, *values)


class FusedAttention(torch.autograd.Function):
    """`fused_attention` with its gradients."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *slots: torch.Tensor) -> Any:
        """Return the output, `[B, H, T, d]`."""
        count = len(slots) // 2
        output, lse = fused_forward(query, key, value, slots[:count], slots[count:])
        ctx.save_for_backward(query, key, value, output, lse, *slots)
        return output.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of all tensors."""
        query, key, value, output, lse, *slots = ctx.saved_tensors
        keys, values = slots[: len(slots) // 2], slots[len(slots) // 2 :]
        gradient = gradients[0].transpose(1, 2).contiguous()
        loss = losses(gradient, output)
        of_query, *of_slots = query_gradients(gradient, query, key, value, keys, values, lse, loss)
        made = (of_query, *key_gradients(gradient, query, key, value, lse, loss), *of_slots)
        return tuple(one.transpose(1, 2) for one in made)


@triton.jit
def row_places(first, tokens, BT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr):
    """Return for the rows of a tile [BM] the token, the query head within the group, and whether the row exists."""
    row = tl.arange(0, BM)
    token = first + row // GROUP
    return token, row % GROUP, (row < BT * GROUP) & (token < tokens)


@triton.jit
def rows_at(heads, offset, there, WIDTH: tl.constexpr, DP: tl.constexpr):
    """Load rows of heads [BM, DP] that begin at some offsets; 0 for rows that do not exist."""
    dims = tl.arange(0, DP)
    mask = there[:, None] & (dims < WIDTH)[None, :]
    return tl.load(heads + offset[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(tile, heads, row, there, WIDTH: tl.constexpr, DP: tl.constexpr):
    """Store rows [BM, DP] into contiguous rows of heads, at the row numbers `row`."""
    dims = tl.arange(0, DP)
    mask = there[:, None] & (dims < WIDTH)[None, :]
    tl.store(heads + row[:, None] * WIDTH + dims[None, :], tile.to(heads.dtype.element_ty), mask=mask)


@triton.jit
def columns_of_slots(start, first, first_token, tokens, BT: tl.constexpr, BS: tl.constexpr):
    """Return for the rows of slots [BS] of a tile the slot, from `first` on, the token, and whether the token exists.

    The tokens of one slot are adjacent.
    """
    column = start + tl.arange(0, BS)
    token = first_token + column % BT
    return first + column // BT, token, token < tokens


@triton.jit
def met(scores, value, highest, total, read, PRECISION: tl.constexpr):
    """Return the highest score, the sum and the output of an online softmax after further keys."""
    above = tl.maximum(highest, tl.max(scores, axis=1))
    shares = tl.exp2(scores - above[:, None])
    shrink = tl.exp2(highest - above)
    total = total * shrink + tl.sum(shares, axis=1)
    return above, total, read * shrink[:, None] + product(shares, value, PRECISION)


@triton.jit
def fused_forward_kernel(
    query, key, value, table, output, lse,
    tokens, kv_heads, texts, slots, runs,
    query_text, query_head, query_token, key_text, key_head, key_token, value_text, value_head, value_token, scaling,
    UNIT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Write the output [B, T, H, d] and the logarithms of the sums of exponentials [B, T, H]."""
    program = tl.program_id(0)
    tile = tl.cdiv(tokens, BT) - 1 - program // (texts * kv_heads)  # tiles with the most keys start first
    text = ((program // kv_heads) % texts).to(tl.int64)
    kv_head = (program % kv_heads).to(tl.int64)
    first_token = tile * BT
    token, member, there = row_places(first_token, tokens, BT, GROUP, BM)
    head = kv_head * GROUP + member
    at = text * query_text + head * query_head + token.to(tl.int64) * query_token
    queries = rows_at(query, at, there, WIDTH, DP)
    scale = scaling * 1.4426950408889634
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    read = tl.zeros([BM, DP], tl.float32)
    key += text * key_text + kv_head * key_head
    value += text * value_text + kv_head * value_head
    near, every = tl.arange(0, BN), tl.full([BN], True, tl.int1)
    all_see = first_token // BN * BN
    for start in range(0, all_see, BN):
        position = start + near
        keys = rows_at(key, position.to(tl.int64) * key_token, every, WIDTH, DP)
        values = rows_at(value, position.to(tl.int64) * value_token, every, WIDTH, DP)
        scores = product(queries, tl.trans(keys), PRECISION) * scale  # [BM, BN]
        highest, total, read = met(scores, values, highest, total, read, PRECISION)
    for start in range(all_see, tl.minimum(first_token + BT, tokens), BN):
        position = start + near
        keys = rows_at(key, position.to(tl.int64) * key_token, position < tokens, WIDTH, DP)
        values = rows_at(value, position.to(tl.int64) * value_token, position < tokens, WIDTH, DP)
        scores = product(queries, tl.trans(keys), PRECISION) * scale
        seen = (position < tokens)[None, :] & (position[None, :] <= token[:, None])
        highest, total, read = met(tl.where(seen, scores, float("-inf")), values, highest, total, read, PRECISION)
    first = 0
    for run in range(runs):
        end = tl.load(table + run * 7).to(tl.int32)
        for start in range(0, (end - first) * BT, BS):
            slot, owner, exists = columns_of_slots(start, first, first_token, tokens, BT, BS)
            exists = exists & (slot < end)
            _, key_offset, value_offset = run_of_table(table + run * 7, text, kv_head, owner.to(tl.int64))
            places, mask = slot_rows(table + runs * 7, slot, exists, key_offset, query, WIDTH, UNIT, DP)
            keys = tl.load(places, mask=mask, other=0.0)
            places, mask = slot_rows(table + runs * 7 + slots, slot, exists, value_offset, query, WIDTH, UNIT, DP)
            values = tl.load(places, mask=mask, other=0.0)
            scores = product(queries, tl.trans(keys), PRECISION) * scale  # [BM, BS]
            scores = tl.where(exists[None, :] & (owner[None, :] == token[:, None]), scores, float("-inf"))
            highest, total, read = met(scores, values, highest, total, read, PRECISION)
        first = end
    row = (text * tokens + token) * kv_heads * GROUP + head
    tl.store(lse + row, (highest + tl.log2(total)) * 0.6931471805599453, mask=there)
    store_rows(read / total[:, None], output, row, there, WIDTH, DP)


@triton.jit
def fused_rows_kernel(gradient, output, loss, rows, WIDTH: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr):
    """Write the loss of each row, [B, T, H]."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    there = row < rows
    upstream = rows_at(gradient, row * WIDTH, there, WIDTH, DP).to(tl.float32)
    along = tl.sum(upstream * rows_at(output, row * WIDTH, there, WIDTH, DP).to(tl.float32), axis=1)
    tl.store(loss + row, along, mask=there)


@triton.jit
def fused_query_gradient_kernel(
    gradient, query, key, value, table, lse, loss, into_query,
    tokens, kv_heads, texts, slots, runs,
    query_text, query_head, query_token, key_text, key_head, key_token, value_text, value_head, value_token, scaling,
    UNIT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Write gradients of the query [B, T, H, d] and of each key and value of the depth [B, T, K, d]."""
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
    divides = tl.load(lse + row, mask=there, other=float("inf")) * 1.4426950408889634
    loses = tl.load(loss + row, mask=there, other=0.0)
    into_queries = tl.zeros([BM, DP], tl.float32)
    key += text * key_text + kv_head * key_head
    value += text * value_text + kv_head * value_head
    near = tl.arange(0, BN)
    for start in range(0, tl.minimum(first_token + BT, tokens), BN):
        position = start + near
        exists = position < tokens
        keys = rows_at(key, position.to(tl.int64) * key_token, exists, WIDTH, DP)
        values = rows_at(value, position.to(tl.int64) * value_token, exists, WIDTH, DP)
        seen = exists[None, :] & (position[None, :] <= token[:, None])
        scores = product(queries, tl.trans(keys), PRECISION) * scale  # [BM, BN]
        shares = tl.where(seen, tl.exp2(scores - divides[:, None]), 0.0)
        into_scores = shares * (product(upstream, tl.trans(values), PRECISION) - loses[:, None])
        into_queries += product(into_scores, keys, PRECISION)
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
    gradient, query, key, value, lse, loss, into_key, into_value,
    tokens, kv_heads, texts,
    query_text, query_head, query_token, key_text, key_head, key_token, value_text, value_head, value_token, scaling,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
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
    for first_token in range(first_key, tokens, BT):
        token, member, there = row_places(first_token, tokens, BT, GROUP, BM)
        head = kv_head * GROUP + member
        at = text * query_text + head * query_head + token.to(tl.int64) * query_token
        queries = rows_at(query, at, there, WIDTH, DP)
        row = (text * tokens + token) * kv_heads * GROUP + head
        upstream = rows_at(gradient, row * WIDTH, there, WIDTH, DP)
        divides = tl.load(lse + row, mask=there, other=float("inf")) * 1.4426950408889634
        loses = tl.load(loss + row, mask=there, other=0.0)
        scores = product(keys, tl.trans(queries), PRECISION) * scale  # [BN, BM]
        shares = tl.where(position[:, None] <= token[None, :], tl.exp2(scores - divides[None, :]), 0.0)
        into_values += product(shares, upstream, PRECISION)
        into_scores = shares * (product(values, tl.trans(upstream), PRECISION) - loses[None, :])
        into_keys += product(into_scores, queries, PRECISION)
    row = (text * tokens + position) * kv_heads + kv_head
    store_rows(into_keys * scaling, into_key, row, exists, WIDTH, DP)
    store_rows(into_values, into_value, row, exists, WIDTH, DP)


def fused_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, `[B, T, H, d]`, and the logarithms of the sums of exponentials, `[B, T, H]`, float32."""
    query, key, value = map(last_dense, (query, key, value))
    (texts, heads, tokens, width), kv_heads = query.shape, key.shape[1]
    output = query.new_empty(texts, tokens, heads, width)
    lse = torch.empty(texts, tokens, heads, dtype=torch.float32, device=query.device)
    tile = _tile(query.device, *_shape(query, kv_heads), _padded_slots(keys))
    table = slot_table(keys, values)
    with on_device_of(query):
        fused_forward_kernel[(_programs(query, kv_heads, tile["BT"]),)](
            query, key, value, table.numbers, output, lse, tokens, kv_heads, texts, len(keys), table.runs,
            *_strides(query, key, value), width**-0.5,
            UNIT=table.unit, WIDTH=width, PRECISION=product_precision(query), **tile,
        )  # fmt: skip
    return output, lse


def losses(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the loss of each row, `[B, T, H]`, float32, from the output and its gradient, `[B, T, H, d]`."""
    loss = torch.empty(output.shape[:3], dtype=torch.float32, device=output.device)
    with on_device_of(output):
        fused_rows_kernel[(-(-loss.numel() // _ROWS_AT_ONCE),)](
            gradient, output, loss, loss.numel(), WIDTH=output.shape[-1], DP=_padded_width(output), BR=_ROWS_AT_ONCE
        )
    return loss


def query_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    lse: torch.Tensor,
    loss: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the gradients of the query, `[B, T, H, d]`, and of the keys and then the values of all slots, `[B, T, K, d]`."""
    query, key, value = map(last_dense, (query, key, value))
    (texts, _, tokens, width), kv_heads = query.shape, key.shape[1]
    into_query = torch.empty_like(gradient)
    into_slots = [query.new_empty(texts, tokens, kv_heads, width) for _ in (*keys, *values)]
    table = slot_table(keys, values, into_slots[: len(keys)], into_slots[len(keys) :])
    tile = _query_tile(query.device, *_shape(query, kv_heads), _padded_slots(keys))
    with on_device_of(query):
        fused_query_gradient_kernel[(_programs(query, kv_heads, tile["BT"]),)](
            gradient, query, key, value, table.numbers, lse, loss, into_query,
            tokens, kv_heads, texts, len(keys), table.runs, *_strides(query, key, value), width**-0.5,
            UNIT=table.unit, PRECISION=product_precision(query), WIDTH=width, **tile,
        )  # fmt: skip
    return [into_query, *into_slots]


def key_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    loss: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the sequence's key and value, `[B, T, K, d]`."""
    query, key, value = map(last_dense, (query, key, value))
    (texts, _, tokens, width), kv_heads = query.shape, key.shape[1]
    into_key, into_value = (query.new_empty(texts, tokens, kv_heads, width) for _ in range(2))
    tile = _key_tile(query.device, *_shape(query, kv_heads))
    with on_device_of(query):
        fused_key_gradient_kernel[(-(-tokens // tile["BN"]) * texts * kv_heads,)](
            gradient, query, key, value, lse, loss, into_key, into_value,
            tokens, kv_heads, texts, *_strides(query, key, value), width**-0.5,
            PRECISION=product_precision(query), WIDTH=width, **tile,
        )  # fmt: skip
    return into_key, into_value


def _strides(*heads: torch.Tensor) -> list[int]:
    return [stride for one in heads for stride in one.stride()[:3]]


def _programs(query: torch.Tensor, kv_heads: int, tile_tokens: int) -> int:
    """Return the number of programs of a launch over all query heads, with `tile_tokens` tokens per program."""
    return -(-query.shape[2] // tile_tokens) * query.shape[0] * kv_heads


def _shape(query: torch.Tensor, kv_heads: int) -> tuple[int, int, int]:
    """Return numbers that tiles depend on: H / K, DP and the bytes of an element."""
    return query.shape[1] // kv_heads, _padded_width(query), query.element_size()


def _padded_width(heads: torch.Tensor) -> int:
    return max(16, power_of_two(heads.shape[-1]))


def _padded_slots(keys: Sequence[torch.Tensor]) -> int:
    """Return the power of two at or above n, up to 128."""
    return min(_MOST_KEYS, power_of_two(len(keys)))


def _sizes(changes: Changes, rows: int, keys: int, warps: int, group: int, dims: int, slots: int) -> Tile:
    """Return the sizes of a program: `rows` for BM, `keys` for BN, and `warps`, unless `changes` replace them."""
    tile = {"BM": rows, "BN": keys, "num_warps": warps, **changes}
    tile_tokens = tile["BM"] // group
    slots_at_once = min(tile["BN"], max(16, power_of_two(slots * tile_tokens)))
    return tile | {"GROUP": group, "BT": tile_tokens, "DP": dims, "BS": slots_at_once, "num_stages": 2}


@tiles("fused_forward_kernel", BM=(64, 128), BN=(16, _MOST_KEYS), num_warps=(2, 8))
def _tile(changes: Changes, group: int, dims: int, element: int, slots: int) -> Tile:
    row_bytes = dims * element
    sizes = (128, 64, 8 if row_bytes > 128 else 4) if row_bytes <= 256 else (64, 32, 8)
    return _sizes(changes, *sizes, group, dims, slots)


@tiles("fused_query_gradient_kernel", BM=(64, 128), BN=(16, _MOST_KEYS), num_warps=(2, 8))
def _query_tile(changes: Changes, group: int, dims: int, element: int, slots: int) -> Tile:
    row_bytes = dims * element
    return _sizes(changes, 64, 64 if row_bytes <= 128 else 32, 4 if row_bytes <= 256 else 8, group, dims, slots)


@tiles("fused_key_gradient_kernel", BM=(64, 128), BN=(16, _MOST_KEYS), num_warps=(2, 8))
def _key_tile(changes: Changes, group: int, dims: int, element: int) -> Tile:
    row_bytes = dims * element
    sizes = (64, 64 if row_bytes <= 256 else 32, 4 if row_bytes <= 128 else 8)
    tile = _sizes(changes, *sizes, group, dims, slots=1)
    del tile["BS"]
    return tile
