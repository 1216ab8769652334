"""Reading of rows of a table that is stored as integers."""

import torch

from midus_hf.ops.chapters.quantisation import dequantise_rows


def read_rows(
    integers: torch.Tensor, scales: torch.Tensor, bits: int, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table of dequantised rows, and the row of this table that each slot reads.

    Only rows that slots name are dequantised, so that a pass of few tokens never holds the whole table; or all rows, if slots name
    more rows than the table has.

    Args:
        integers: `[N, W]`, int8, or for 4 bits `[N, W / 2]`, uint8.
        scales: `[N]`, floating point.
        bits: Bits per integer, 8 or 4.
        slots: int64, of any shape, `0 <= slot < N`.
        dtype: Dtype of the rows.

    Returns:
        Rows `[R, W]`, and slots in the shape of `slots`, which count these rows.
    """
    # While a graph is traced, the number of slots may be unknown, and a comparison would fix it.
    if not torch.compiler.is_compiling() and slots.numel() >= len(integers):
        return dequantise_rows(integers, scales, bits, dtype), slots
    named = slots.flatten()
    places = torch.arange(named.shape[0], device=slots.device).view_as(slots)
    return dequantise_rows(integers[named], scales[named], bits, dtype), places
