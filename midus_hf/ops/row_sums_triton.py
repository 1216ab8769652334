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
def segment_sums_kernel(
    keys,
    order,
    source,
    weights,
    output,
    partial_keys,
    partial_sums,
    count,
    m,
    source_stride,
    output_stride,
    width,
    num_rows,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BE: tl.constexpr,
    BV: tl.constexpr,
):
    """Sum runs of equal keys among BE entries in order, as a product with a 0-1 matrix that says which run each is in.

    A run that begins and ends inside the block is complete and goes to `output`. The first and the last may go on in
    the neighbouring blocks: they become two entries of a shorter list, in the same order, for the next launch.
    """
    block = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BE)
    entries = block * BE + places
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    valid = entries < count
    key = tl.where(valid, tl.load(keys + entries, mask=valid, other=0).to(tl.int32), num_rows)
    before = tl.load(keys + entries - 1, mask=valid & (places > 0), other=0).to(tl.int32)
    begins = (places == 0) | (key != before)  # what lies past the end has the key `num_rows` and weight 0
    run = tl.associative_scan(tl.where(begins, places, 0), 0, larger)  # [BE], where the run of each entry begins
    if FIRST:
        entry = tl.load(order + entries, mask=valid, other=0)
        weight = tl.load(weights + entry, mask=valid, other=0.0).to(tl.float32)
        row = entry // m
    else:
        weight = valid.to(tl.float32)
        row = entries
    mask = valid[:, None] & (columns < width)[None, :]
    terms = tl.load(source + row[:, None] * source_stride + columns[None, :], mask=mask, other=0.0)
    share = tl.where(places[:, None] == run[None, :], weight[None, :], 0.0)  # [places where runs begin, entries]
    if PRECISION is None:
        sums = tl.dot(share.to(terms.dtype), terms)
    else:
        sums = tl.dot(share, terms.to(tl.float32), input_precision=PRECISION)
    last = tl.max(run, axis=0)
    targets = output + key.to(tl.int64)[:, None] * output_stride + columns[None, :]
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
        keys, order = slots.flatten().to(narrowest_integer(num_rows)).sort(stable=True)
        for start in range(0, width, _STRETCH):
            _segment_sums(keys, order, gradient, weights, output, m, start, min(_STRETCH, width - start))
    return output


def _segment_sums(
    keys: torch.Tensor,
    order: torch.Tensor,
    gradient: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    m: int,
    start: int,
    width: int,
) -> None:
    """Fill columns `start` to `start + width` of `output`, launch by launch, until one block holds all that is left."""
    source, target = gradient[:, start:], output[:, start:]
    first, entries_a_block = True, 64
    wide = gradient.dtype == torch.float32 or interprets_kernels()
    while True:
        count = len(keys)
        blocks = triton.cdiv(count, entries_a_block)
        columns = max(16, min(64 if wide else 128, power_of_two(width)))  # what registers hold
        partial_keys = torch.empty(2 * blocks, dtype=torch.int32, device=keys.device)
        partial_sums = torch.empty(2 * blocks, width, dtype=torch.float32, device=keys.device)
        segment_sums_kernel[(blocks, triton.cdiv(width, columns))](
            keys, order, source, weights, target, partial_keys, partial_sums,
            count, m, source.stride(0), target.stride(0), width, len(output),
            FIRST=first, LAST=blocks == 1, PRECISION=precise_product() if wide else None,
            BE=entries_a_block, BV=columns,
        )  # fmt: skip
        if blocks == 1:
            return
        keys, source, first, wide = partial_keys, partial_sums, False, True
