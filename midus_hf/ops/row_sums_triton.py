"""Kernels that sum table rows, and gradients by row.

Shapes: `E` entries in all, one for each token and slot it retrieved; `BE` entries per program; `BV` columns of a row.
"""

import torch

from midus_hf.ops.backend import interprets_kernels
from midus_hf.ops.precision import narrowest_integer
from midus_hf.ops.triton_import import tl, triton
from midus_hf.ops.triton_launch import on_device_of, power_of_two, precise_product

_STRETCH = 256
"""Columns whose partial sums are held at a time."""

_REACH_OF_32_BITS = 1 << 30
"""Elements; within it places are divided by multiplying them."""


@triton.jit
def weighted_rows_kernel(bank, slots, weights, output, m, width, BM: tl.constexpr, BV: tl.constexpr):
    """`output[s] = sum_m weights[s, m] * bank[slots[s, m]]`, a token and BV columns per program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    total = tl.zeros([BV], tl.float32)
    for start in range(0, m, BM):
        entries = start + tl.arange(0, BM)
        slot = tl.load(slots + token * m + entries, mask=entries < m, other=0).to(tl.int64)
        weight = tl.load(weights + token * m + entries, mask=entries < m, other=0.0).to(tl.float32)
        mask = (entries < m)[:, None] & (columns < width)[None, :]
        rows = tl.load(bank + slot[:, None] * width + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(rows * weight[:, None], axis=0)
    tl.store(output + token * width + columns, total.to(output.dtype.element_ty), mask=columns < width)


@triton.jit
def weight_gradients_kernel(gradient, bank, slots, output, m, width, BM: tl.constexpr, BV: tl.constexpr):
    """`output[s, m] = <gradient[s], bank[slots[s, m]]>`, a token and BM of its entries per program."""
    token = tl.program_id(0).to(tl.int64)
    entries = tl.program_id(1) * BM + tl.arange(0, BM)
    slot = tl.load(slots + token * m + entries, mask=entries < m, other=0).to(tl.int64)
    total = tl.zeros([BM], tl.float32)
    for start in range(0, width, BV):
        columns = start + tl.arange(0, BV)
        mask = (entries < m)[:, None] & (columns < width)[None, :]
        rows = tl.load(bank + slot[:, None] * width + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        part = tl.load(gradient + token * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        total += tl.sum(rows * part[None, :], axis=1)
    tl.store(output + token * m + entries, total, mask=entries < m)


@triton.jit
def add_rows_kernel(gradient, slots, weights, output, count, m, width, BE: tl.constexpr, BV: tl.constexpr):
    """Add every entry's gradient to its row, in whatever order the device gets there."""
    entries = tl.program_id(0).to(tl.int64) * BE + tl.arange(0, BE)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    valid = entries < count
    slot = tl.load(slots + entries, mask=valid, other=0).to(tl.int64)
    weight = tl.load(weights + entries, mask=valid, other=0.0).to(tl.float32)
    mask = valid[:, None] & (columns < width)[None, :]
    terms = tl.load(gradient + (entries // m)[:, None] * width + columns[None, :], mask=mask, other=0.0)
    tl.atomic_add(
        output + slot[:, None] * width + columns[None, :],
        terms.to(tl.float32) * weight[:, None],
        mask=mask,
        sem="relaxed",
    )


@triton.jit
def larger(first, second):
    """For a running maximum."""
    return tl.maximum(first, second)


@triton.jit
def place_of_entry(
    entry, tokens, inverse, shift, HEADS: tl.constexpr, M: tl.constexpr, BY_HEAD: tl.constexpr, IS_LARGE: tl.constexpr
):
    """Token, head and rank of an entry of [S, H, M], or of [H, S, M] with `BY_HEAD`; `inverse` and `shift` as `divisor_of` S says."""
    rank = entry % M
    if BY_HEAD:
        place = entry // M
        if IS_LARGE:
            head = place // tokens
        else:  # a division by what is not known takes ten times as long
            head = (tl.umulhi(place.to(tl.uint32) * 4, inverse.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)
        token = place - head * tokens
    else:
        head = entry // M % HEADS
        token = entry // (M * HEADS)
    return token, head, rank


@triton.jit
def segment_sums_kernel(
    keys, order, source, weights, output, partial_keys, partial_sums,
    count, tokens, inverse, shift, token_stride, head_stride, output_stride, width, num_rows,
    FIRST: tl.constexpr, LAST: tl.constexpr, BY_HEAD: tl.constexpr, IS_LARGE: tl.constexpr, PRECISION: tl.constexpr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, M: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Sum runs of equal keys among BE entries in order, as a product with a 0-1 matrix that says which run each is in.

    A run that begins and ends inside the block is complete and goes to `output`. The first and the last may go on in
    the neighbouring blocks: they become two entries of a shorter list, in the same order, for the next launch.

    In the first launch `keys` are slots, and `order` says which entry is where. With `BY_HEAD` each head has rows of its own: row
    `head * SLOTS + slot`, whose entries stand together where slots are in order, and heads among equal slots.
    """
    block = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BE)
    entries = block * BE + places
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    valid = entries < count
    key = tl.load(keys + entries, mask=valid, other=0).to(tl.int32)
    has_before = valid & (places > 0)
    before = tl.load(keys + entries - 1, mask=has_before, other=0).to(tl.int32)
    if FIRST:
        entry = tl.load(order + entries, mask=valid, other=0)
        entry = entry if IS_LARGE else entry.to(tl.int32)
        token, head, rank = place_of_entry(entry, tokens, inverse, shift, HEADS, M, BY_HEAD, IS_LARGE)
        weight = tl.load(weights + (token * HEADS + head) * M + rank, mask=valid, other=0.0).to(tl.float32)
        row = source + (token * token_stride + head * head_stride)
        if BY_HEAD:
            entry_before = tl.load(order + entries - 1, mask=has_before, other=0)
            entry_before = entry_before if IS_LARGE else entry_before.to(tl.int32)
            _, head_before, _ = place_of_entry(entry_before, tokens, inverse, shift, HEADS, M, BY_HEAD, IS_LARGE)
            key += head.to(tl.int32) * SLOTS
            before += head_before.to(tl.int32) * SLOTS
    else:
        weight = valid.to(tl.float32)
        row = source + entries * token_stride
    key = tl.where(valid, key, num_rows)
    begins = (places == 0) | (key != before)  # what lies past the end has the key `num_rows` and weight 0
    run = tl.associative_scan(tl.where(begins, places, 0), 0, larger)  # [BE], where the run of each entry begins
    mask = valid[:, None] & (columns < width)[None, :]
    terms = tl.load(row[:, None] + columns[None, :], mask=mask, other=0.0)
    share = tl.where(places[:, None] == run[None, :], weight[None, :], 0.0)  # [places where runs begin, entries]
    if PRECISION is None:
        sums = tl.dot(share.to(terms.dtype), terms)
    else:
        sums = tl.dot(share, terms.to(tl.float32), input_precision=PRECISION)
    last = tl.max(run, axis=0)
    of_row = (key.to(tl.int64) if IS_LARGE else key) * output_stride
    targets = output + of_row[:, None] + columns[None, :]
    complete = begins & (key < num_rows)
    if not LAST:
        complete = complete & (places > 0) & (places < last)
    column_mask = (columns < width)[None, :]
    tl.store(targets, sums, mask=complete[:, None] & column_mask)
    if not LAST:
        # A block of one run gives its sum as the first entry, and zeros of the same key as the second.
        alone = (places == 0) & (last == 0)
        is_second = alone | ((places == last) & (places > 0))
        first = partial_sums + 2 * block * width + columns[None, :] + places[:, None] * 0
        tl.store(first, sums, mask=(places == 0)[:, None] & column_mask)
        tl.store(first + width, tl.where(alone[:, None], 0.0, sums), mask=is_second[:, None] & column_mask)
        first_key = partial_keys + 2 * block + places * 0
        tl.store(first_key, key, mask=places == 0)
        tl.store(first_key + 1, key, mask=is_second)


def triton_weighted_rows(bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`sum_m weights[s, m] * bank[slots[s, m]]`: `[S, v]`, the dtype of `bank`."""
    (count, m), width = slots.shape, bank.shape[1]
    output = bank.new_empty(count, width)
    if output.numel():
        columns = min(256, power_of_two(width))
        with on_device_of(bank):
            weighted_rows_kernel[(count, triton.cdiv(width, columns))](
                bank.contiguous(), slots.contiguous(), weights.contiguous(), output, m, width,
                BM=min(16, power_of_two(m)), BV=columns,
            )  # fmt: skip
    return output


def triton_weight_gradients(gradient: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`<gradient[s], bank[slots[s, m]]>`: `[S, m]`, float32."""
    (count, m), width = slots.shape, bank.shape[1]
    output = torch.zeros(count, m, dtype=torch.float32, device=bank.device)
    if output.numel() and width:
        entries = min(16, power_of_two(m))
        with on_device_of(bank):
            weight_gradients_kernel[(count, triton.cdiv(m, entries))](
                gradient.contiguous(), bank.contiguous(), slots.contiguous(), output, m, width,
                BM=entries, BV=min(256, power_of_two(width)),
            )  # fmt: skip
    return output


def triton_row_sums(
    gradient: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, num_rows: int, *, atomic: bool
) -> torch.Tensor:
    """`sum over (s, m) with slots[s, m] == r of weights[s, m] * gradient[s]`: `[num_rows, v]`, float32.

    Args:
        gradient: `[S, v]`.
        slots: `[S, m]`.
        weights: `[S, m]`.
        num_rows: R.
        atomic: Whether entries are added in any order. Otherwise they are sorted by row, and rows summed in the order
            of the tokens, level by level, so that no row hit by all tokens is left to one program.
    """
    width, m = gradient.shape[1], slots.shape[1]
    output = torch.zeros(num_rows, width, dtype=torch.float32, device=gradient.device)
    count = slots.numel()
    if not count or not width:
        return output
    gradient, slots, weights = gradient.contiguous(), slots.contiguous(), weights.contiguous()
    with on_device_of(gradient):
        if atomic:
            columns = min(64, power_of_two(width))
            add_rows_kernel[(triton.cdiv(count, 32), triton.cdiv(width, columns))](
                gradient, slots, weights, output, count, m, width, BE=32, BV=columns
            )
            return output
        slots = slots.to(narrowest_integer(num_rows))
        _sorted_sums(gradient.unsqueeze(1), slots.unsqueeze(1), weights.unsqueeze(1), output, by_head=False)
    return output


def triton_bank_gradient(
    gradient: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, bank_shape: torch.Size
) -> torch.Tensor:
    """Of a bank `[N, v]` or `[H, N, v]`: as `triton_row_sums` in order, float32.

    Args:
        gradient: `[S, H, v]`.
        slots: `[S, H, m]`.
        weights: `[S, H, m]`.
        bank_shape: Its shape.
    """
    output = torch.zeros(bank_shape, dtype=torch.float32, device=gradient.device)
    if slots.numel() and output.numel():
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        with on_device_of(gradient):
            rows = output.flatten(0, -2)
            _sorted_sums(gradient, slots.contiguous(), weights.contiguous(), rows, by_head=len(bank_shape) == 3)
    return output


def _sorted_sums(
    gradient: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, *, by_head: bool
) -> None:
    """Fill `output` `[R, v]`, zero so far, with the sums of `[S, H, v]` by slot, or by head and slot.

    Slots alone are sorted, often of 16 bits: entries stand by head before, and so do those of equal slots after.
    """
    entries = slots.transpose(0, 1) if by_head else slots
    keys, order = entries.flatten().sort(stable=True)
    for start in range(0, output.shape[1], _STRETCH):
        stretch = slice(start, min(start + _STRETCH, output.shape[1]))
        _segment_sums(keys, order, gradient[..., stretch], weights, output[:, stretch], by_head)


def _segment_sums(
    keys: torch.Tensor,
    order: torch.Tensor,
    gradient: torch.Tensor,
    weights: torch.Tensor,
    target: torch.Tensor,
    by_head: bool,
) -> None:
    """Fill some columns of the output, launch by launch, until one block holds all that is left."""
    (tokens, heads, m), (num_rows, width) = weights.shape, target.shape
    reach = max(len(keys), num_rows * target.stride(0), 1 + sum(map(_reach, gradient.shape, gradient.stride())))
    source, strides, first, entries_a_block = gradient, gradient.stride()[:2], True, 64
    wide = gradient.dtype == torch.float32 or interprets_kernels()
    while True:
        count = len(keys)
        blocks = triton.cdiv(count, entries_a_block)
        columns = max(16, min(64 if wide else 128, power_of_two(width)))  # what registers hold
        partial_keys = torch.empty(2 * blocks, dtype=torch.int32, device=keys.device)
        partial_sums = torch.empty(2 * blocks, width, dtype=torch.float32, device=keys.device)
        segment_sums_kernel[(blocks, triton.cdiv(width, columns))](
            keys, order, source, weights, target, partial_keys, partial_sums,
            count, tokens, *divisor_of(tokens), *strides, target.stride(0), width, num_rows,
            FIRST=first, LAST=blocks == 1, BY_HEAD=by_head, IS_LARGE=reach >= _REACH_OF_32_BITS,
            PRECISION=precise_product() if wide else None, SLOTS=num_rows // heads, HEADS=heads, M=m,
            BE=entries_a_block, BV=columns,
        )  # fmt: skip
        if blocks == 1:
            return
        keys, source, strides, first, wide = partial_keys, partial_sums, (width, 0), False, True


def divisor_of(number: int) -> tuple[int, int]:
    """By what `x < 2^30` is divided without a division: `(x * inverse) >> (30 + shift) == x // number`."""
    shift = (number - 1).bit_length()
    return -(-(1 << 30 + shift) // number), shift


def _reach(size: int, stride: int) -> int:
    return (size - 1) * abs(stride)
