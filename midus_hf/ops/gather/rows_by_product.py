"""Weighted sums of table rows as a matrix product: a matrix of the weights of all rows, times the whole table.

The product multiplies every token with every row, which is many times the work of reading the few rows that a token
needs. But tensor cores multiply rows much faster than memory delivers them: if tokens read much of a small table of
wide rows, the product takes less time. Its gradients are two more products, and need no sort of the slots.

Sizes: S tokens with m slots each, R rows of width v.
"""

import torch

from midus_hf.ops.dispatch.precision import without_autocast
from midus_hf.ops.gather.triton import triton_spread_weights

# Largest number of weights that the matrix holds at a time: 128 MB in half precision, and twice that for its gradient.
_MOST_ELEMENTS = 1 << 26

# Least average number of reads per row for which multiplying with all rows can pay.
_LEAST_READS = 4


def product_takes_less(tokens: int, m: int, num_rows: int, width: int) -> bool:
    """Return whether the product is expected to take less than two thirds of the time of reading rows.

    The estimate is for bfloat16 on an H100 or H200. Per token and column, reading takes 2 m bytes at the 5.5 TB/s of
    the second-level cache, and the product 2 R operations at 600 TFLOP/s. A weight is written and read at 4 TB/s, and
    takes its compiled kernel 1.3 ps at least. In all, reading takes 0.36 m ps and the product 0.0033 R (1 + 700 / v)
    ps. None of this was measured.

    Args:
        tokens: Number of tokens, S.
        m: Slots that a token reads.
        num_rows: Rows of the table, R.
        width: Width of a row, v.
    """
    is_read_often = tokens * m >= _LEAST_READS * num_rows
    return is_read_often and num_rows * (width + 700) <= 72 * m * width


def product_of_rows(bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, backend: str) -> torch.Tensor:
    """Return `sum_m weights[s, m] * bank[slots[s, m]]`: `[S, v]`, the dtype of `bank`.

    The weights of a token at one row are added and rounded to the dtype of `bank` before the product.

    Raises:
        IndexError: On a CPU, if a slot is no row of the bank.
    """
    if not slots.is_cuda and slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < len(bank):
        raise IndexError(f"slots lie from {int(slots.min())} to {int(slots.max())}; the bank has {len(bank)} rows.")
    bank = bank.contiguous()  # for another layout, a product may add in another order
    stretch = _tokens_at_a_time(len(bank))
    parts = [
        _wide_product(_spread(*part, len(bank), bank.dtype, backend), bank).to(bank.dtype)
        for part in zip(slots.split(stretch), weights.split(stretch), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gradients_of_product(
    gradient: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the bank `[R, v]` and of the weights `[S, m]`, float32 at least, for a gradient `[S, v]`."""
    bank, gradient = bank.contiguous(), gradient.contiguous()  # for another layout, a product may add in another order
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
    """Return `[S, num_rows]`, the weights of each token at the rows that the token reads, and 0 elsewhere."""
    if backend == "triton":
        return triton_spread_weights(slots, weights, num_rows, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    spread = torch.zeros(len(slots), num_rows, dtype=wide, device=slots.device)
    return spread.scatter_add_(1, slots.long(), weights.to(wide)).to(dtype)


def _wide_product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a matrix product that is summed in float32 at least, in that dtype."""
    wide = torch.promote_types(first.dtype, torch.float32)
    if first.is_cuda and first.dtype != wide and not torch.version.hip:
        return torch.mm(first, second, out_dtype=wide)
    with without_autocast(first.device.type):
        return first.to(wide) @ second.to(wide)
