"""Kernels of attention over the depth: the forward pass, and where slots lie.

Slots are tensors of their own, read where they are: a table on the device says at which addresses, sorted by strides into runs. A
program takes one token and one head of keys and values: its group of query heads meets BS slots at once in a matrix product, by an
online softmax. What is read twice is the queries and the table alone, so memory sets the pace.

Shapes: B texts, H query heads, K heads of keys and values, T tokens, n slots, R runs of slots; `GP` the power of two at or above
H / K, at least 16; `DP` that of the width of a head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from midus_hf.ops.depth.inputs import DepthInputs, DepthReading
from midus_hf.ops.dispatch.tiles import Changes, Tile, tiles
from midus_hf.ops.dispatch.triton import on_device_of, power_of_two, product, product_precision, tl, triton

_MOST_WIDTH = 256
"""Of a head: tiles of 16 rows of more would not fit where they are multiplied."""

_MOST_GROUP = 64
"""Query heads of one head of keys and values: a program holds what all of them read."""

_MOST_PROGRAMS = (1 << 31) - 1
"""Of one launch."""

_RUN_NUMBERS = 7
"""Of each run in the table: where its slots end, and strides in bytes of texts, heads and tokens, of keys and of values."""

_MOST_AT_ONCE = 64
"""Slots that are read at once."""

_VECTOR_BYTES = 16
"""Of the widest load of one thread, which must begin at a multiple of them."""


class SlotTable(NamedTuple):
    """Where slots lie.

    Args:
        numbers: `[R * 7 + c * n]`, int64: runs, then addresses of keys, of values, and of whatever else each slot has.
        runs: R.
        unit: A number of bytes that every row begins at a multiple of: 16, which one thread loads at once, or an element's.
        slots: The tensors, which must outlive the launch.
    """

    numbers: torch.Tensor
    runs: int
    unit: int
    slots: tuple[torch.Tensor, ...]


@triton.jit
def program_place(tokens, kv_heads):
    """The text, token and head of keys and values that this program takes; heads lie next to one another."""
    program = tl.program_id(0)
    text_and_token = program // kv_heads
    text, token = text_and_token // tokens, text_and_token % tokens
    return text.to(tl.int64), token.to(tl.int64), (program % kv_heads).to(tl.int64)


@triton.jit
def group_tile(heads, offset, stride, GROUP: tl.constexpr, WIDTH: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr):
    """Rows of the query heads of a group [GP, DP]."""
    rows, dims = tl.arange(0, GP), tl.arange(0, DP)
    mask = (rows < GROUP)[:, None] & (dims < WIDTH)[None, :]
    return tl.load(heads + offset + rows[:, None] * stride + dims[None, :], mask=mask, other=0.0)


@triton.jit
def store_group_tile(
    tile, heads, offset, GROUP: tl.constexpr, WIDTH: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Write rows of the query heads of a group, which lie next to one another."""
    rows, dims = tl.arange(0, GP), tl.arange(0, DP)
    mask = (rows < GROUP)[:, None] & (dims < WIDTH)[None, :]
    tl.store(heads + offset + rows[:, None] * WIDTH + dims[None, :], tile.to(heads.dtype.element_ty), mask=mask)


@triton.jit
def run_of_table(run, text, head, token):
    """Where the slots of a run end, and how far from their addresses the rows of keys and of values of a token and head are."""
    key = text * tl.load(run + 1) + head * tl.load(run + 2) + token * tl.load(run + 3)
    value = text * tl.load(run + 4) + head * tl.load(run + 5) + token * tl.load(run + 6)
    return tl.load(run).to(tl.int32), key, value


@triton.jit
def slot_rows(addresses, slot, there, offset, like, WIDTH: tl.constexpr, UNIT: tl.constexpr, DP: tl.constexpr):
    """Pointers to rows of slots [BS, DP], and which of them there are."""
    dims = tl.arange(0, DP)
    row = tl.load(addresses + slot, mask=there, other=0) + offset
    first = tl.multiple_of(row.to(tl.pointer_type(like.dtype.element_ty)), [UNIT])  # of numbers it would be forgotten
    return first[:, None] + dims[None, :], there[:, None] & (dims < WIDTH)[None, :]


@triton.jit
def capped(scores, softcap):
    """`softcap * tanh(scores / softcap)`."""
    return softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))


@triton.jit
def depth_forward_kernel(
    query, table, output, lse,
    tokens, kv_heads, slots, runs, text_stride, head_stride, token_stride, scaling, softcap,
    CAPPED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """What each head reads [B, T, H, d], and the log-sum-exp of its scores [B, T, H]."""
    text, token, kv_head = program_place(tokens, kv_heads)
    head = kv_head * GROUP
    asked = group_tile(
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
            rows, mask = slot_rows(keys, slot, there, key_offset, query, WIDTH, UNIT, DP)
            key = tl.load(rows, mask=mask, other=0.0)
            rows, mask = slot_rows(values, slot, there, value_offset, query, WIDTH, UNIT, DP)
            value = tl.load(rows, mask=mask, other=0.0)
            scores = product(asked, tl.trans(key), PRECISION) * scaling  # [GP, BS]
            if CAPPED:
                scores = capped(scores, softcap)
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


def triton_depth_attention(inputs: DepthInputs) -> DepthReading:
    """Return what heads read, `[B, H, T, d]`, and log-sum-exps `[B, H, T]`, float32; both lie in memory token by token."""
    query, keys, values, scaling, softcap = inputs
    query = last_dense(query)
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
                **_tile(query.device, *depth_shape(query, kv_heads, len(keys))),
            )  # fmt: skip
    return DepthReading(output.transpose(1, 2), lse.transpose(1, 2))


def slot_table(
    keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], *others: Sequence[torch.Tensor]
) -> SlotTable:
    """Say where slots lie.

    Args:
        keys: n of `[B, K, T, d]`.
        values: As `keys`.
        others: What else each slot has; such tensors are all laid out alike.
    """
    keys, values = ([last_dense(slot) for slot in slots] for slots in (keys, values))
    size = keys[0].element_size()
    strides = [
        tuple(size * stride for stride in (*key.stride()[:3], *value.stride()[:3]))
        for key, value in zip(keys, values, strict=True)
    ]
    order = sorted(range(len(keys)), key=strides.__getitem__)
    addresses = [slots[slot].data_ptr() for slots in (keys, values, *others) for slot in order]
    in_bytes = (keys[0].shape[-1] * size, *addresses, *(stride for of_slot in set(strides) for stride in of_slot))
    unit = _VECTOR_BYTES if all(number % _VECTOR_BYTES == 0 for number in in_bytes) else size
    numbers: list[int] = []
    for end, slot in enumerate(order, start=1):
        if end == len(order) or strides[order[end]] != strides[slot]:
            numbers += (end, *strides[slot])
    runs = len(numbers) // _RUN_NUMBERS
    return SlotTable(device_numbers(numbers + addresses, keys[0]), runs, unit, (*keys, *values))


def last_dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, copied if numbers of one row are not next to one another."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def depth_shape(query: torch.Tensor, kv_heads: int, slots: int) -> tuple[int, int, int, int]:
    """What tiles depend on: GP, DP, bytes of an element, and the power of two at or above n, up to the largest tile."""
    group, width = query.shape[1] // kv_heads, query.shape[-1]
    slots_at_once = max(16, min(_MOST_AT_ONCE, power_of_two(slots)))
    return max(16, power_of_two(group)), max(16, power_of_two(width)), query.element_size(), slots_at_once


def depth_tile(changes: Changes, group: int, dims: int, element: int, slots: int, tile_bytes: int = 16 << 10) -> Tile:
    """Sizes of a program: of the rows of the slots that are read at once, at most `tile_bytes`."""
    return {
        "GP": group,
        "DP": dims,
        "BS": min(slots, max(16, tile_bytes // (dims * element))),
        "num_warps": 4,
        "num_stages": 1,  # most programs have one round of slots: others hide what it waits for, if they find place
        **changes,
    }


_tile = tiles("depth_forward_kernel", BS=(16, _MOST_AT_ONCE), num_warps=(1, 8))(depth_tile)


def depth_refusal(query: torch.Tensor, keys: Sequence[torch.Tensor]) -> str | None:
    """What the kernels cannot take of these tensors, and what they expect; None where they take them."""
    (texts, heads, tokens, width), kv_heads = query.shape, keys[0].shape[1]
    if width > _MOST_WIDTH:
        return f"heads are {width} wide; expected {_MOST_WIDTH} or less"
    if heads // kv_heads > _MOST_GROUP:
        return f"{heads // kv_heads} query heads read each head of keys and values; expected {_MOST_GROUP} or fewer"
    if texts * tokens * kv_heads > _MOST_PROGRAMS:
        return f"there are {texts} texts of {tokens} tokens and {kv_heads} heads of keys; expected {_MOST_PROGRAMS} or less in all"
    return None


_MOST_A_LAUNCH = 256
"""Numbers that one launch writes: 2 KB of arguments, of the 4 KB that any GPU takes."""

_FEWEST_A_LAUNCH = 16
"""Few numbers are padded to as many: the kernel is compiled for each power of two in between."""

_ABOVE = 1 << 62
"""Added to what is passed. Triton compiles anew for a whole number that is 1, or even 16-fold, or fits into 32 bits: odd numbers of
64 bits are all alike."""


@triton.jit
def write_numbers_kernel(numbers, into, COUNT: tl.constexpr):
    """Numbers of a tuple, doubled and raised by 2^62 + 1, as they were: [COUNT]."""
    for place in tl.static_range(COUNT):
        tl.store(into + place, (numbers[place] - 4611686018427387905) // 2)


def device_numbers(numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Numbers where a tensor is, without waiting for its device.

    Args:
        numbers: Between -2^60 and 2^60, one or more.
        like: On the device.

    Returns:
        `[n]`, int64.
    """
    sizes = [min(_MOST_A_LAUNCH, len(numbers) - start) for start in range(0, len(numbers), _MOST_A_LAUNCH)]
    padded = (len(sizes) - 1) * _MOST_A_LAUNCH + max(_FEWEST_A_LAUNCH, power_of_two(sizes[-1]))
    written = torch.empty(padded, dtype=torch.int64, device=like.device)
    passed = [2 * number + 1 + _ABOVE for number in numbers] + [1 + _ABOVE] * (padded - len(numbers))
    with on_device_of(like):
        for start in range(0, padded, _MOST_A_LAUNCH):
            part = tuple(passed[start : start + _MOST_A_LAUNCH])
            write_numbers_kernel[(1,)](part, written[start:], COUNT=len(part), num_warps=1)
    return written[: len(numbers)]
