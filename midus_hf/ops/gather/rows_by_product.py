"""Weighted sums of table rows as a matrix product: a matrix that has the weights of all rows, times the whole table.

Every token is multiplied with every row, which is many times the work of reading the few that it asks for. But tensor cores do this
work at a rate at which rows cannot be read: where heads read much of a small table of wide rows, the product is done sooner. And its
gradients are two more products, without a sort of what was read.

Shapes: S tokens with m slots each, R rows of width v.
"""

import torch

from midus_hf.ops.dispatch.precision import without_autocast
from midus_hf.ops.gather.triton.rows import triton_spread_weights

_MOST_ELEMENTS = 1 << 26
"""Of the matrix of weights held at a time: 128 MB in half precision, and twice that of the gradient of it."""

_LEAST_READS = 4
"""Reads of each row, on average, that are worth reading all of them."""


def product_takes_less(tokens: int, m: int, num_rows: int, width: int) -> bool:
    """Whether the product is expected to take less than two thirds of the time on an H100 or H200, in bfloat16.

    Of a token and column, reading takes 2 m bytes at 5.5 TB/s, which is what their second-level cache gives, and the product 2 R
    operations at 600 TFLOP/s; a weight is written and read at 4 TB/s, and takes its kernel 1.3 ps at least, compiled: 0.36 m
    against 0.0033 R (1 + 700 / v) ps. None of this was measured.

    Args:
        tokens: S.
        m: Slots that a token reads.
        num_rows: R.
        width: v.
    """
    is_read_often = tokens * m >= _LEAST_READS * num_rows
    return is_read_often and num_rows * (width + 700) <= 72 * m * width


def product_of_rows(bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, backend: str) -> torch.Tensor:
    """`sum_m weights[s, m] * bank[slots[s, m]]`: `[S, v]`, the dtype of `bank`, to which the sums of weights are rounded.

    Raises:
        IndexError: On a CPU, if a slot is no row of the bank.
    """
    if not slots.is_cuda and slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < len(bank):
        raise IndexError(f"slots lie from {int(slots.min())} to {int(slots.max())}; the bank has {len(bank)} rows.")
    stretch = _tokens_at_a_time(len(bank))
    parts = [
        _wide_product(_spread(*part, len(bank), bank.dtype, backend), bank).to(bank.dtype)
        for part in zip(slots.split(stretch), weights.split(stretch), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gradients_of_product(
    gradient: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the bank `[R, v]` and of the weights `[S, m]`, float32 at least, for a gradient `[S, v]`."""
    stretch = _tokens_at_a_time(len(bank))
    wide = torch.promote_types(bank.dtype, torch.float32)
    into_bank, into_weights = torch.zeros(bank.shape, dtype=wide, device=bank.device), []
    gradient = gradient.to(bank.dtype)
    for upstream, read, how in zip(gradient.split(stretch), slots.split(stretch), weights.split(stretch), strict=True):
        into_bank += _wide_product(_spread(read, how, len(bank), bank.dtype, backend).mT, upstream)
        into_weights.append(_wide_product(upstream, bank.mT).gather(1, read.long()))
    return into_bank, torch.cat(into_weights)


def _tokens_at_a_time(num_rows: int) -> int:
    return max(1, _MOST_ELEMENTS // max(1, num_rows))


def _spread(
    slots: torch.Tensor, weights: torch.Tensor, num_rows: int, dtype: torch.dtype, backend: str
) -> torch.Tensor:
    """`[S, num_rows]`, the weights of a token at the rows that it reads."""
    if backend == "triton":
        return triton_spread_weights(slots, weights, num_rows, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    spread = torch.zeros(len(slots), num_rows, dtype=wide, device=slots.device)
    return spread.scatter_add_(1, slots.long(), weights.to(wide)).to(dtype)


def _wide_product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """A matrix product summed, and returned, in float32 at least."""
    wide = torch.promote_types(first.dtype, torch.float32)
    if first.is_cuda and first.dtype != wide and not torch.version.hip:
        return torch.mm(first, second, out_dtype=wide)
    with without_autocast(first.device.type):
        return first.to(wide) @ second.to(wide)
