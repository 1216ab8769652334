"""Kernels that sum table rows, and gradients by row.

Shapes: `E` entries in all, one for each token and slot it retrieved; `BE` entries per program; `BV` columns of a row.
"""

import torch

from midus_hf.ops.bucket_sums_triton import bucket_sums
from midus_hf.ops.triton_import import tl, triton
from midus_hf.ops.triton_launch import on_device_of, power_of_two, quotient_above


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


def triton_weighted_rows(bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`sum_m weights[s, m] * bank[slots[s, m]]`: `[S, v]`, the dtype of `bank`."""
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


def triton_weight_gradients(gradient: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`<gradient[s], bank[slots[s, m]]>`: `[S, m]`, float32."""
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
            of the tokens (`bucket_sums`).
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
            add_rows_kernel[(quotient_above(count, 32), quotient_above(width, columns))](
                gradient, slots, weights, output, count, m, width, BE=32, BV=columns
            )
            return output
        bucket_sums(gradient.unsqueeze(1), slots.unsqueeze(1), weights.unsqueeze(1), output, by_head=False)
    return output


def triton_bank_gradient(
    gradient: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, bank_shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Of a bank `[N, v]` or `[H, N, v]`: as `triton_row_sums` in order, summed in float32.

    Args:
        gradient: `[S, H, v]`.
        slots: `[S, H, m]`.
        weights: `[S, H, m]`.
        bank_shape: Its shape.
        dtype: Of the sums, to which they are rounded once.
    """
    output = torch.zeros(bank_shape, dtype=dtype, device=gradient.device)
    if slots.numel() and output.numel():
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        with on_device_of(gradient):
            rows = output.flatten(0, -2)
            bucket_sums(gradient, slots.contiguous(), weights.contiguous(), rows, by_head=len(bank_shape) == 3)
    return output
