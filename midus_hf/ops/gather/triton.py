"""Kernels that sum table rows per token, and gradients per row in a fixed order.

An entry is a token with one of its slots. Sums per token read `BM` entries of a token and `BV` columns of a row at a time. Sums per
row go by buckets of neighbouring rows: entries are sorted by bucket only, and added to a tile of the bucket's rows, some at a time,
by a product on tensor cores with a matrix that holds the weight of each entry at its row. A bucket of many entries is summed in
pieces, whose sums are added in their order: so no single program sums a row that every token reads.

Sizes: `BR` rows per bucket; `BE` entries at a time, `PIECE` per program; `BV` columns of a row. A group is a bucket or, if each head
has separate rows, a bucket of one head.
"""

import torch
from torch import Tensor

from midus_hf.ops.dispatch.calling import narrowest_integer
from midus_hf.ops.dispatch.triton import (
    interprets_kernels,
    on_device_of,
    power_of_two,
    product,
    product_precision,
    quotient_above,
    tl,
    triton,
)

_ROWS = 64  # rows of a bucket: a tile of tensor cores, and the slots of one row sub-key if each side has 64 sub-keys
_PIECE = 4096  # most entries of a program
_STRETCH = 256  # columns for which the sums of pieces are held at a time
_REACH_OF_32_BITS = (1 << 31) - 1


@triton.jit
def group_starts_kernel(
    keys, order, starts, count, entries_per_head, groups, STEPS: tl.constexpr, HEADS: tl.constexpr, BG: tl.constexpr
):
    """Write the first entry of each group, [groups + 1]; `order` sorts entries of each head by `keys`."""
    group = tl.program_id(0) * BG + tl.arange(0, BG)
    bucket, first = group // HEADS, (group % HEADS).to(tl.int64) * entries_per_head
    low, high = tl.zeros([BG], tl.int64), tl.zeros([BG], tl.int64) + count
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_open = low < high
        key = tl.load(keys + middle, mask=is_open, other=0).to(tl.int32)
        entry = tl.load(order + middle, mask=is_open, other=0)
        is_before = is_open & ((key < bucket) | ((key == bucket) & (entry < first)))
        low, high = tl.where(is_before, middle + 1, low), tl.where(is_before, high, middle)
    tl.store(starts + group, low, mask=group <= groups)


@triton.jit
def store_rows(
    output, total, group, width, output_stride, ROWS: tl.constexpr, HEADS: tl.constexpr, BR: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Store the sums [BR, BV] of a group's rows; each head has ROWS rows."""
    row = group // HEADS * BR + tl.arange(0, BR)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    there = output + (group % HEADS).to(tl.int64) * ROWS * output_stride
    there = there + row.to(tl.int64)[:, None] * output_stride + columns[None, :]
    tl.store(there, total.to(output.dtype.element_ty), mask=(row < ROWS)[:, None] & (columns < width)[None, :])


@triton.jit
def place_of(
    entry, head, entries_per_head, BY_HEAD: tl.constexpr, IS_LARGE: tl.constexpr, HEADS: tl.constexpr, M: tl.constexpr
):
    """Return the token, the head and the index in [S, HEADS, M] of entries.

    Entries are numbered as in [S, HEADS, M], or with `BY_HEAD` as in [HEADS, S, M], where all of them belong to `head`.
    """
    if BY_HEAD:
        entry = entry - head.to(tl.int64) * entries_per_head
    entry = entry if IS_LARGE else entry.to(tl.int32)
    if BY_HEAD:
        token = entry // M
        return token, head, entry + (token * (HEADS - 1) + head) * M
    else:
        return entry // (HEADS * M), entry // M % HEADS, entry


@triton.jit
def bucket_sums_kernel(
    order, slots, source, weights, starts, ends, owners, output, scratch,
    entries_per_head, groups, token_stride, head_stride, output_stride, width,
    BY_HEAD: tl.constexpr, IS_EVEN: tl.constexpr, IS_LARGE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, M: tl.constexpr, PIECE: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Sum one piece of a group, to `output` if the group has no other, else to `scratch`."""
    group = tl.load(owners + tl.program_id(0)).to(tl.int32)
    if group < groups:
        start_of_group, end = tl.load(starts + group), tl.load(starts + group + 1)
        piece = tl.program_id(0) - tl.load(ends + group - 1, mask=group > 0, other=0)
        first = start_of_group + piece * PIECE
        count = tl.minimum(end - first, PIECE).to(tl.int32)
        places, rows = tl.arange(0, BE), tl.arange(0, BR)
        columns = tl.program_id(1) * BV + tl.arange(0, BV)
        first_row = group // (HEADS if BY_HEAD else 1) * BR
        total = tl.zeros([BR, BV], tl.float32)
        for start in range(0, count, BE):
            valid = start + places < count
            entry = tl.load(order + first + start + places, mask=valid, other=0)
            token, head, index = place_of(entry, group % HEADS, entries_per_head, BY_HEAD, IS_LARGE, HEADS, M)
            weight = tl.load(weights + index, mask=valid, other=0.0).to(tl.float32)
            row = tl.load(slots + index, mask=valid, other=0).to(tl.int32) - first_row
            share = tl.where(rows[:, None] == row[None, :], weight[None, :], 0.0)  # [BR, BE]
            pointers = source + (token * token_stride + head * head_stride)[:, None] + columns[None, :]
            mask = valid[:, None] if IS_EVEN else valid[:, None] & (columns < width)[None, :]
            terms = tl.load(pointers, mask=mask, other=0.0)
            total += product(share, terms, PRECISION)
        if end - start_of_group <= PIECE:
            store_rows(output, total, group, width, output_stride, ROWS, HEADS if BY_HEAD else 1, BR, BV)
        else:
            # Groups before this one need at most two tiles per PIECE entries.
            there = scratch + (2 * (start_of_group // PIECE) + piece) * (BR * width)
            tl.store(there + rows[:, None] * width + columns[None, :], total, mask=(columns < width)[None, :])


@triton.jit
def piece_sums_kernel(
    starts, output, scratch, width, output_stride, ROWS: tl.constexpr, HEADS: tl.constexpr, PIECE: tl.constexpr,
    BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Sum the pieces of a group that has several."""
    group = tl.program_id(0)
    start = tl.load(starts + group)
    count = tl.load(starts + group + 1) - start
    if count > PIECE:
        rows, columns = tl.arange(0, BR), tl.program_id(1) * BV + tl.arange(0, BV)
        there = scratch + 2 * (start // PIECE) * (BR * width) + rows[:, None] * width + columns[None, :]
        mask = (columns < width)[None, :]
        total = tl.zeros([BR, BV], tl.float32)
        for piece in range(tl.cdiv(count, PIECE).to(tl.int32)):
            total += tl.load(there + tl.cast(piece, tl.int64) * (BR * width), mask=mask, other=0.0)
        store_rows(output, total, group, width, output_stride, ROWS, HEADS, BR, BV)


def bucket_sums(gradient: Tensor, slots: Tensor, weights: Tensor, output: Tensor, *, by_head: bool) -> None:
    """Fill `output` with the sums of weighted gradients per slot, or per head and slot.

    Args:
        gradient: `[S, H, v]`, with a contiguous last dimension.
        slots: `[S, H, m]`, contiguous, not empty.
        weights: `[S, H, m]`, contiguous.
        output: `[R, v]`, zeros: the rows of a bank that heads share, or with `by_head` of each head's bank, head after head.
        by_head: Whether each head has a separate bank.
    """
    (tokens, heads, m), (num_rows, width) = slots.shape, output.shape
    rows = num_rows // heads if by_head else num_rows
    buckets, count = quotient_above(rows, _ROWS), slots.numel()
    groups = buckets * heads if by_head else buckets
    entries = slots.transpose(0, 1) if by_head else slots
    integer = torch.uint8 if buckets <= 256 else narrowest_integer(buckets)  # the fewer bytes, the faster to sort
    keys, order = (entries // _ROWS).to(integer).flatten().sort(stable=True)
    starts = torch.empty(groups + 1, dtype=torch.int64, device=slots.device)
    group_starts_kernel[(quotient_above(groups + 1, 128),)](
        keys, order, starts, count, tokens * m, groups, STEPS=count.bit_length(), HEADS=heads if by_head else 1, BG=128
    )
    ends = starts.diff().add_(_PIECE - 1).div_(_PIECE, rounding_mode="floor").cumsum(0)
    programs = min(groups, count) + count // _PIECE  # an upper bound
    owners = torch.searchsorted(ends, torch.arange(programs, device=slots.device), right=True)
    reach = max(
        count, sum((size - 1) * abs(stride) for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
    )
    is_wide = gradient.dtype == torch.float32
    # A product of float32 takes 32 entries: with more, the three products that it consists of spill on compute capability 8.0.
    if is_wide and not interprets_kernels():
        at_once = 32
    else:
        at_once = 128 if count >= 128 * groups else 64
    for start in range(0, width, _STRETCH):
        target, source = output[:, start : start + _STRETCH], gradient[..., start : start + _STRETCH]
        columns = max(16, min(64 if is_wide else 128, power_of_two(target.shape[1])))  # as many as registers hold
        scratch = torch.empty(2 * (count // _PIECE) * _ROWS, target.shape[1], dtype=torch.float32, device=slots.device)
        parts = quotient_above(target.shape[1], columns)
        bucket_sums_kernel[(programs, parts)](
            order, slots, source, weights, starts, ends, owners, target, scratch,
            tokens * m, groups, *source.stride()[:2], target.stride(0), target.shape[1],
            BY_HEAD=by_head, IS_EVEN=target.shape[1] % columns == 0, IS_LARGE=reach > _REACH_OF_32_BITS,
            PRECISION=product_precision(gradient), ROWS=rows, HEADS=heads, M=m, PIECE=_PIECE, BR=_ROWS, BV=columns,
            BE=at_once, num_warps=4,
        )  # fmt: skip
        if count > _PIECE:
            piece_sums_kernel[(groups, parts)](
                starts, target, scratch, target.shape[1], target.stride(0),
                ROWS=rows, HEADS=heads if by_head else 1, PIECE=_PIECE, BR=_ROWS, BV=columns,
            )  # fmt: skip


@triton.jit
def weighted_rows_kernel(bank, slots, weights, output, m, width, BM: tl.constexpr, BV: tl.constexpr):
    """Write `output[s] = sum_m weights[s, m] * bank[slots[s, m]]`, a token and BV columns per program."""
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
    """Write `output[s, m] = <gradient[s], bank[slots[s, m]]>`, a token and BM of its entries per program."""
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


def triton_weighted_rows(bank: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Return `sum_m weights[s, m] * bank[slots[s, m]]`: `[S, v]`, the dtype of `bank`."""
    (count, m), width = slots.shape, bank.shape[1]
    output = bank.new_empty(count, width)
    if output.numel():
        columns = min(256, power_of_two(width))
        with on_device_of(bank):
            weighted_rows_kernel[(count, quotient_above(width, columns))](
                bank.contiguous(), slots.contiguous(), weights.contiguous(), output, m, width,
                BM=min(16, power_of_two(m)), BV=columns,
            )  # fmt: skip
    return output


def triton_weight_gradients(gradient: Tensor, bank: Tensor, slots: Tensor) -> Tensor:
    """Return `<gradient[s], bank[slots[s, m]]>`: `[S, m]`, float32."""
    (count, m), width = slots.shape, bank.shape[1]
    output = torch.zeros(count, m, dtype=torch.float32, device=bank.device)
    if output.numel() and width:
        entries = min(16, power_of_two(m))
        with on_device_of(bank):
            weight_gradients_kernel[(count, quotient_above(m, entries))](
                gradient.contiguous(), bank.contiguous(), slots.contiguous(), output, m, width,
                BM=entries, BV=min(256, power_of_two(width)),
            )  # fmt: skip
    return output


def triton_row_sums(gradient: Tensor, slots: Tensor, weights: Tensor, num_rows: int) -> Tensor:
    """Return `weights[s, m] * gradient[s]` summed by row `slots[s, m]`: `[num_rows, v]`, float32."""
    shape = torch.Size((num_rows, gradient.shape[1]))
    return triton_bank_gradient(gradient.unsqueeze(1), slots.unsqueeze(1), weights.unsqueeze(1), shape, torch.float32)


def triton_bank_gradient(
    gradient: Tensor, slots: Tensor, weights: Tensor, bank_shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of a bank, summed in float32 in the order of tokens, rounded to `dtype` once.

    Shapes: gradient `[S, H, v]`, slots and weights `[S, H, m]`, bank `[N, v]` or `[H, N, v]`.
    """
    output = torch.zeros(bank_shape, dtype=dtype, device=gradient.device)
    if slots.numel() and output.numel():
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        with on_device_of(gradient):
            rows = output.flatten(0, -2)
            bucket_sums(gradient, slots.contiguous(), weights.contiguous(), rows, by_head=len(bank_shape) == 3)
    return output
