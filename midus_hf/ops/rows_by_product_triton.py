"""A kernel that writes, of every token, the weights of all rows of a table."""

import torch

from midus_hf.ops.triton_import import tl, triton
from midus_hf.ops.triton_launch import (
    on_device_of,
    power_of_two,
    precise_product,
    quotient_above,
    wide_ranged_product,
)


@triton.jit
def spread_weights_kernel(
    slots, weights, spread, m, rows, PRECISION: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BL: tl.constexpr
):
    """`spread[s, r]`, the sum of the weights of token s at row r, for BH * BL rows of one token per program.

    A row has a high and a low digit, and the sum over entries is a product of two matrices: of weights at high digits [BH, BM], and
    of ones at low digits [BM, BL]. So entries of one row add up in a fixed order, without atomics.
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
    """`[S, num_rows]` in `dtype`: weights `[S, m]` at their slots `[S, m]`; those of one row are summed in float32.

    For bfloat16 each is rounded to TF32 before.
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
