"""Kernels of attention to the depth, and the table of slot addresses that they read.

Slots are separate tensors, read in place. A table on the device has their addresses, sorted into runs of slots with the same strides.
A program takes one token and one head of keys and values: matrix products multiply its group of query heads with BS slots at once, in
an online softmax. Memory bandwidth bounds the speed. Each program writes the gradients of the rows that it reads, so no sums cross
programs; shares are recomputed from the log-sum-exp.

Sizes: B texts, H query heads, K heads of keys and values, T tokens, n slots, R runs of slots; `GP` the power of two at or above H /
K, and `DP` the power of two at or above the width of a head, both at least 16.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from midus_hf.ops.dispatch.library import with_rows
from midus_hf.ops.dispatch.triton import Tile, on_device_of, power_of_two, product, product_precision, tl, triton

# Largest width of a head: a tile of 16 wider rows would not fit into shared memory, from which it is multiplied.
_MAX_WIDTH = 256

_MAX_GROUP = 64  # maximum query heads per head of keys and values: a program holds the outputs of all of them
_MAX_PROGRAMS = (1 << 31) - 1  # of one launch
_MAX_SLOTS_AT_ONCE = 64
# Per run in the table: the end of its slots, then the strides in bytes of texts, heads and tokens, of keys and of values.
_NUMBERS_PER_RUN = 7

_VECTOR_BYTES = 16  # bytes of the widest load of one thread, whose address must be a multiple of this


class SlotTable(NamedTuple):
    """Addresses and strides of slots, for kernels."""

    numbers: Tensor  # `[R * 7 + c * n]`, int64: the runs, then the addresses of the c tensors of each slot
    runs: int  # R
    unit: int  # alignment of row addresses in bytes: 16, which one thread loads at once, or the size of an element
    slots: tuple[Tensor, ...]  # keys and values, which must outlive the launch


@triton.jit
def program_place(tokens, kv_heads):
    """Return the text, token and head of keys and values that this program takes; heads vary fastest."""
    program = tl.program_id(0)
    text_and_token = program // kv_heads
    text, token = text_and_token // tokens, text_and_token % tokens
    return text.to(tl.int64), token.to(tl.int64), (program % kv_heads).to(tl.int64)


@triton.jit
def group_tile(heads, offset, stride, GROUP: tl.constexpr, WIDTH: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr):
    rows, dims = tl.arange(0, GP), tl.arange(0, DP)
    mask = (rows < GROUP)[:, None] & (dims < WIDTH)[None, :]
    return tl.load(heads + offset + rows[:, None] * stride + dims[None, :], mask=mask, other=0.0)


@triton.jit
def store_group_tile(
    tile, heads, offset, GROUP: tl.constexpr, WIDTH: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    rows, dims = tl.arange(0, GP), tl.arange(0, DP)
    mask = (rows < GROUP)[:, None] & (dims < WIDTH)[None, :]
    tl.store(heads + offset + rows[:, None] * WIDTH + dims[None, :], tile.to(heads.dtype.element_ty), mask=mask)


@triton.jit
def run_of_table(run, text, head, token):
    """Return the end of a run's slots, and offsets in bytes of a token's and head's keys and values."""
    key = text * tl.load(run + 1) + head * tl.load(run + 2) + token * tl.load(run + 3)
    value = text * tl.load(run + 4) + head * tl.load(run + 5) + token * tl.load(run + 6)
    return tl.load(run).to(tl.int32), key, value


@triton.jit
def slot_rows(addresses, slot, there, offset, like, WIDTH: tl.constexpr, UNIT: tl.constexpr, DP: tl.constexpr):
    """Return pointers to rows of slots [BS, DP], and a mask of those within the run and the width."""
    dims = tl.arange(0, DP)
    row = tl.load(addresses + slot, mask=there, other=0) + offset
    # The hint would be lost on an integer.
    first = tl.multiple_of(row.to(tl.pointer_type(like.dtype.element_ty)), [UNIT])
    return first[:, None] + dims[None, :], there[:, None] & (dims < WIDTH)[None, :]


@triton.jit
def slots_and_scores(
    queries, keys, values, slot, there, key_offset, value_offset, like, scaling, softcap,
    CAPPED: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Return the rows of the keys and values of slots [BS, DP], and the scores of queries [GP, BS]."""
    rows, mask = slot_rows(keys, slot, there, key_offset, like, WIDTH, UNIT, DP)
    key = tl.load(rows, mask=mask, other=0.0)
    rows, mask = slot_rows(values, slot, there, value_offset, like, WIDTH, UNIT, DP)
    value = tl.load(rows, mask=mask, other=0.0)
    scores = product(queries, tl.trans(key), PRECISION) * scaling
    if CAPPED:
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))  # softcap * tanh(scores / softcap)
    return key, value, scores


@triton.jit
def depth_forward_kernel(
    query, table, output, lse,
    tokens, kv_heads, slots, runs, text_stride, head_stride, token_stride, scaling, softcap,
    CAPPED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Write what each head reads [B, T, H, d], and the log-sum-exp of its scores [B, T, H]."""
    text, token, kv_head = program_place(tokens, kv_heads)
    head = kv_head * GROUP
    queries = group_tile(
        query, text * text_stride + token * token_stride + head * head_stride, head_stride, GROUP, WIDTH, GP, DP
    )
    keys = table + runs * 7
    values = keys + slots
    highest = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    read = tl.zeros([GP, DP], tl.float32)
    first = 0
    for run in range(runs):
        end, key_offset, value_offset = run_of_table(table + run * 7, text, kv_head, token)
        for start in range(first, end, BS):
            slot = start + tl.arange(0, BS)
            there = slot < end
            _key, value, scores = slots_and_scores(
                queries, keys, values, slot, there, key_offset, value_offset, query, scaling, softcap,
                CAPPED, UNIT, WIDTH, PRECISION, DP,
            )  # fmt: skip
            scores = tl.where(there[None, :], scores, float("-inf"))
            above = tl.maximum(highest, tl.max(scores, axis=1))
            shares = tl.exp(scores - above[:, None])
            shrink = tl.exp(highest - above)
            total = total * shrink + tl.sum(shares, axis=1)
            read = read * shrink[:, None] + product(shares, value, PRECISION)
            highest = above
        first = end
    row = (text * tokens + token) * kv_heads * GROUP + head
    store_group_tile(read / total[:, None], output, row * WIDTH, GROUP, WIDTH, GP, DP)
    members = tl.arange(0, GP)
    tl.store(lse + row + members, highest + tl.log(total), mask=members < GROUP)


def triton_depth_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scaling: float,
    softcap: Optional[float],  # noqa: UP045 - torch.library reads only this form
) -> tuple[Tensor, Tensor]:
    """Compute `depth_attention`: `[B, H, T, d]` and log-sum-exps `[B, H, T]`, float32, token by token."""
    query = with_rows(query)
    (texts, heads, tokens, width), kv_heads = query.shape, keys[0].shape[1]
    output = query.new_empty(texts, tokens, heads, width)
    lse = torch.empty(texts, tokens, heads, dtype=torch.float32, device=query.device)
    if output.numel():
        table = slot_table(keys, values)
        with on_device_of(query):
            depth_forward_kernel[(texts * tokens * kv_heads,)](
                query, table.numbers, output, lse,
                tokens, kv_heads, len(keys), table.runs, *query.stride()[:3], scaling, softcap or 1.0,
                CAPPED=softcap is not None, UNIT=table.unit, PRECISION=product_precision(query), GROUP=heads // kv_heads, WIDTH=width,
                **depth_tile(query, kv_heads, len(keys)),
            )  # fmt: skip
    return output.transpose(1, 2), lse.transpose(1, 2)


def slot_table(keys: Sequence[Tensor], values: Sequence[Tensor], *others: Sequence[Tensor]) -> SlotTable:
    """Build the table of slot addresses on their device; `others` are more tensors per slot."""
    keys, values = ([with_rows(slot) for slot in slots] for slots in (keys, values))
    size = keys[0].element_size()
    strides = [
        tuple(size * stride for stride in (*key.stride()[:3], *value.stride()[:3]))
        for key, value in zip(keys, values, strict=True)
    ]
    order = sorted(range(len(keys)), key=strides.__getitem__)
    addresses = [slots[slot].data_ptr() for slots in (keys, values, *others) for slot in order]
    in_bytes = (keys[0].shape[-1] * size, *addresses, *(stride for each in set(strides) for stride in each))
    unit = _VECTOR_BYTES if all(number % _VECTOR_BYTES == 0 for number in in_bytes) else size
    numbers: list[int] = []
    for end, slot in enumerate(order, start=1):
        if end == len(order) or strides[order[end]] != strides[slot]:
            numbers += (end, *strides[slot])
    runs = len(numbers) // _NUMBERS_PER_RUN
    return SlotTable(device_numbers(numbers + addresses, keys[0]), runs, unit, (*keys, *values))


def depth_tile(query: Tensor, kv_heads: int, slots: int, tile_bytes: int = 16 << 10) -> Tile:
    """Return the sizes of a program: 16 slots at once, or more with at most `tile_bytes` of rows."""
    group, dims = (max(16, power_of_two(size)) for size in (query.shape[1] // kv_heads, query.shape[-1]))
    at_once = max(16, min(_MAX_SLOTS_AT_ONCE, power_of_two(slots)))
    return {
        "GP": group,
        "DP": dims,
        "BS": min(at_once, max(16, tile_bytes // (dims * query.element_size()))),
        "num_warps": 4,
        "num_stages": 1,  # most programs have one round of slots; other resident programs hide its waiting for memory
    }


def depth_refusal(query: Tensor, keys: Sequence[Tensor]) -> str | None:
    """Return why the kernels do not support these tensors, and what they expect; None if they do."""
    (texts, heads, tokens, width), kv_heads = query.shape, keys[0].shape[1]
    if width > _MAX_WIDTH:
        return f"heads are {width} wide; expected {_MAX_WIDTH} or less"
    if heads // kv_heads > _MAX_GROUP:
        return f"{heads // kv_heads} query heads read each head of keys and values; expected {_MAX_GROUP} or fewer"
    if texts * tokens * kv_heads > _MAX_PROGRAMS:
        return f"there are {texts} texts of {tokens} tokens and {kv_heads} heads of keys; expected {_MAX_PROGRAMS} or less in all"
    return None


# Maximum numbers that one launch writes: 2 KB of the 4 KB of arguments that any GPU takes.
_MAX_NUMBERS_PER_LAUNCH = 256
# Minimum numbers that one launch writes, after padding: the kernel is compiled for each power of two up to the most.
_MIN_NUMBERS_PER_LAUNCH = 16
# Summand of passed numbers: Triton compiles anew for integers of 32 bits, 1 and multiples of 16, not for odd 64-bit ones.
_ABOVE = 1 << 62


@triton.jit
def write_numbers_kernel(numbers, into, COUNT: tl.constexpr):
    """Write the numbers [COUNT] of a tuple, in which n is passed as 2 n + 2^62 + 1."""
    for index in tl.static_range(COUNT):
        tl.store(into + index, (numbers[index] - 4611686018427387905) // 2)


def device_numbers(numbers: Sequence[int], like: Tensor) -> Tensor:
    """Return integers between -2^60 and 2^60 on a tensor's device, int64, without waiting for it."""
    sizes = [
        min(_MAX_NUMBERS_PER_LAUNCH, len(numbers) - start) for start in range(0, len(numbers), _MAX_NUMBERS_PER_LAUNCH)
    ]
    padded = (len(sizes) - 1) * _MAX_NUMBERS_PER_LAUNCH + max(_MIN_NUMBERS_PER_LAUNCH, power_of_two(sizes[-1]))
    written = torch.empty(padded, dtype=torch.int64, device=like.device)
    passed = [2 * number + 1 + _ABOVE for number in numbers] + [1 + _ABOVE] * (padded - len(numbers))
    with on_device_of(like):
        for start in range(0, padded, _MAX_NUMBERS_PER_LAUNCH):
            part = tuple(passed[start : start + _MAX_NUMBERS_PER_LAUNCH])
            write_numbers_kernel[(1,)](part, written[start:], COUNT=len(part), num_warps=1)
    return written[: len(numbers)]


# Bytes of slots read at once: with twice as many, a thread takes up to 255 registers, and few programs run together.
_TILE_BYTES = 4 << 10


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
    # Infinity makes shares of padding heads zero.
    log_sum = tl.load(lse + row + members, mask=members < GROUP, other=float("inf"))
    # Gradient of a score: its share * (<gradient, value> - <gradient, output> + gradient of the log-sum-exp).
    mean = tl.sum(upstream.to(tl.float32) * read.to(tl.float32), axis=1)
    mean -= tl.load(lse_gradient + row + members, mask=members < GROUP, other=0.0)
    keys = table + runs * 7
    values = keys + slots
    into_keys = values + slots
    into_values = into_keys + slots
    row_bytes = WIDTH * query.dtype.element_ty.primitive_bitwidth // 8
    into_offset = ((text * tokens + token) * kv_heads + kv_head) * row_bytes
    into_group = tl.zeros([GP, DP], tl.float32)
    first = 0
    for run in range(runs):
        end, key_offset, value_offset = run_of_table(table + run * 7, text, kv_head, token)
        for start in range(first, end, BS):
            slot = start + tl.arange(0, BS)
            there = slot < end
            key, value, scores = slots_and_scores(
                queries, keys, values, slot, there, key_offset, value_offset, query, scaling, softcap,
                CAPPED, UNIT, WIDTH, PRECISION, DP,
            )  # fmt: skip
            slopes = scaling
            if CAPPED:
                slopes = scaling * (1 - (scores / softcap) * (scores / softcap))
            shares = tl.where(there[None, :], tl.exp(scores - log_sum[:, None]), 0.0)
            into_shares = product(upstream, tl.trans(value), PRECISION)
            into_scores = shares * (into_shares - mean[:, None]) * slopes
            if WANTS_QUERY:
                into_group += product(into_scores, key, PRECISION)
            if WANTS_SLOTS:
                into_key = product(tl.trans(into_scores), queries, PRECISION)  # [BS, DP]
                rows, mask = slot_rows(into_keys, slot, there, into_offset, query, WIDTH, UNIT, DP)
                tl.store(rows, into_key.to(query.dtype.element_ty), mask=mask)
                into_value = product(tl.trans(shares), upstream, PRECISION)
                rows, mask = slot_rows(into_values, slot, there, into_offset, query, WIDTH, UNIT, DP)
                tl.store(rows, into_value.to(query.dtype.element_ty), mask=mask)
        first = end
    if WANTS_QUERY:
        store_group_tile(into_group, into_query, row * WIDTH, GROUP, WIDTH, GP, DP)


def triton_depth_gradients(
    gradient: Tensor,
    lse_gradient: Tensor,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    output: Tensor,
    lse: Tensor,
    scaling: float,
    softcap: Optional[float],  # noqa: UP045
    wants: list[bool],
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """Return the gradients of query, keys and values, token by token; None or empty if not needed."""
    wants_query, wants_slots = wants[0], any(wants[1:])
    query = with_rows(query)
    (texts, heads, tokens, width), kv_heads = query.shape, keys[0].shape[1]
    parts = (gradient.to(query.dtype), lse_gradient.float(), output, lse)
    by_token = [tensor.transpose(1, 2).contiguous() for tensor in parts]
    into_query = query.new_empty(texts, tokens, heads, width) if wants_query else None
    into_keys, into_values = (
        [query.new_empty(texts, tokens, kv_heads, width) for _ in slots] if wants_slots else []
        for slots in (keys, values)
    )
    if query.numel() and (wants_query or wants_slots):
        table = slot_table(keys, values, into_keys, into_values) if wants_slots else slot_table(keys, values)
        with on_device_of(query):
            depth_gradient_kernel[(texts * tokens * kv_heads,)](
                by_token[0], by_token[1], query, by_token[2], by_token[3], table.numbers,
                query if into_query is None else into_query,
                tokens, kv_heads, len(keys), table.runs, *query.stride()[:3], scaling, softcap or 1.0,
                WANTS_QUERY=wants_query, WANTS_SLOTS=wants_slots, CAPPED=softcap is not None, UNIT=table.unit,
                PRECISION=product_precision(query), GROUP=heads // kv_heads, WIDTH=width,
                **depth_tile(query, kv_heads, len(keys), _TILE_BYTES),
            )  # fmt: skip
    keys_by_head, values_by_head = ([into.transpose(1, 2) for into in slots] for slots in (into_keys, into_values))
    return None if into_query is None else into_query.transpose(1, 2), keys_by_head, values_by_head
