"""Kernels that sum table rows per token, and gradients per row.

An entry is a token with one of its slots. Sizes: `BM` entries of a token at a time; `BV` columns of a row.
"""

import torch

from midus_hf.ops.dispatch.triton import (
    on_device_of,
    power_of_two,
    precise_product,
    quotient_above,
    tl,
    triton,
    wide_ranged_product,
)
from midus_hf.ops.gather.triton.bucket_sums import bucket_sums


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


def triton_weighted_rows(bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
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


def triton_weight_gradients(gradient: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
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


def triton_row_sums(gradient: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return `sum over (s, m) with slots[s, m] == r of weights[s, m] * gradient[s]`: `[num_rows, v]`, float32.

    Entries are sorted by bucket of rows, and each row is summed in the order of the tokens (`bucket_sums`).

    Args:
        gradient: Gradient of the sum of each token, `[S, v]`.
        slots: Rows that each token reads, `[S, m]`.
        weights: Weights of these rows, `[S, m]`.
        num_rows: Rows of the table, R.
    """
    shape = torch.Size((num_rows, gradient.shape[1]))
    return triton_bank_gradient(gradient.unsqueeze(1), slots.unsqueeze(1), weights.unsqueeze(1), shape, torch.float32)


def triton_bank_gradient(
    gradient: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, bank_shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradient of a bank: for each row the sum of weights times gradients, in float32, in the order of tokens.

    Args:
        gradient: Gradient of the sum of each token and head, `[S, H, v]`.
        slots: Rows that each token and head reads, `[S, H, m]`.
        weights: Weights of these rows, `[S, H, m]`.
        bank_shape: `[N, v]` or `[H, N, v]`.
        dtype: Dtype of the result, to which the sums are rounded once.
    """
    output = torch.zeros(bank_shape, dtype=dtype, device=gradient.device)
    if slots.numel() and output.numel():
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        with on_device_of(gradient):
            rows = output.flatten(0, -2)
            bucket_sums(gradient, slots.contiguous(), weights.contiguous(), rows, by_head=len(bank_shape) == 3)
    return output


@triton.jit
def spread_weights_kernel(
    slots, weights, spread, m, rows, PRECISION: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BL: tl.constexpr
):
    """Write `spread[s, r]`, the sum of the weights of token s at row r, for BH * BL rows of one token per program.

    A row number has a high and a low digit. The sum over entries is the product of two matrices: weights at high digits
    [BH, BM], and ones at low digits [BM, BL]. So the entries of one row add up in a fixed order, without atomics.
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (BH * BL)
    highs, lows = tl.arange(0, BH), tl.arange(0, BL)
    total = tl.zeros([BH, BL], tl.float32)
    for start in range(0, m, BM):
        entries = start + tl.arange(0, BM)
        slot = tl.load(slots + token * m + entries, mask=entries < m, other=-1).to(tl.int32) - first
        weight = tl.load(weights + token * m + entries, mask=entries < m, other=0.0).to(tl.float32)
        high = tl.where(slot >= 0, slot // BL, -1)
        at_high = tl.where(high[None, :] == highs[:, None], weight[None, :], 0.0)
        at_low = ((slot & (BL - 1))[:, None] == lows[None, :]).to(tl.float32)
        total += tl.dot(at_high, at_low, input_precision=PRECISION)
    row = first + highs[:, None] * BL + lows[None, :]
    tl.store(spread + token * rows + row, total.to(spread.dtype.element_ty), mask=row < rows)


def triton_spread_weights(
    slots: torch.Tensor, weights: torch.Tensor, num_rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """Place weights `[S, m]` at their slots `[S, m]`: `[S, num_rows]` in `dtype`, 0 elsewhere.

    Weights at the same row are summed in float32; for a result in bfloat16, each weight is rounded to TF32 before.
    """
    tokens, m = slots.shape
    spread = torch.empty(tokens, num_rows, dtype=dtype, device=slots.device)
    if tokens:
        low = 64
        high = max(16, min(64, power_of_two(quotient_above(num_rows, low))))
        # TF32 has three bits more than bfloat16.
        precision = wide_ranged_product() if dtype == torch.bfloat16 else precise_product()
        with on_device_of(slots):
            spread_weights_kernel[(tokens, quotient_above(num_rows, high * low))](
                slots.contiguous(), weights.contiguous(), spread, m, num_rows,
                PRECISION=precision, BM=max(16, min(32, power_of_two(m))), BH=high, BL=low,
            )  # fmt: skip
    return spread
