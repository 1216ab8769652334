"""Tables whose rows are stored as small integers, with one scale per row."""

import torch

# Largest integer per number of bits; the element of a row with the largest magnitude becomes this integer or its
# negative.
_LARGEST = {8: 127, 4: 7}

_LEAST_SCALE = 1e-8


def quantise_rows(table: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of a table to integers from -127 to 127 or from -7 to 7: symmetric absmax quantisation.

    Args:
        table: `[N, W]`, floating point; W is even for 4 bits.
        bits: Bits per integer, 8 or 4.

    Returns:
        Integers and scales. Integers are `[N, W]`, int8, or for 4 bits `[N, W / 2]`, uint8, with the element of the
        even index in the low half of a byte. Scales are `[N]`, float32.

    Raises:
        ValueError: If `bits` is neither 8 nor 4, or W is odd for 4 bits.
    """
    largest = _largest_of(bits)
    wide = table.float()
    scales = (wide.abs().amax(-1) / largest).clamp(min=_LEAST_SCALE)
    integers = (wide / scales.unsqueeze(-1)).round().clamp(-largest, largest).to(torch.int8)
    if bits == 8:
        return integers, scales
    if table.shape[-1] % 2:
        raise ValueError(
            f"rows have {table.shape[-1]} elements; expected an even number, two per byte. Choose 8 bits."
        )
    low, high = integers[..., 0::2] & 0x0F, integers[..., 1::2] & 0x0F
    return low.to(torch.uint8) | (high.to(torch.uint8) << 4), scales


def dequantise_rows(integers: torch.Tensor, scales: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise rows of integers with their scales.

    Args:
        integers: `[..., W]`, int8, or for 4 bits `[..., W / 2]`, uint8.
        scales: One scale per row, `[...]`.
        bits: Bits per integer, 8 or 4.
        dtype: Dtype of the result, in which integers are multiplied by scales.

    Returns:
        `[..., W]`.

    Raises:
        ValueError: If `bits` is neither 8 nor 4.
    """
    _largest_of(bits)
    if bits == 4:
        halves = torch.stack([integers & 0x0F, integers >> 4], dim=-1).flatten(-2).to(torch.int8)  # [..., W], 0 to 15
        integers = torch.where(halves > 7, halves - 16, halves)
    return integers.to(dtype) * scales.to(dtype).unsqueeze(-1)


def _largest_of(bits: int) -> int:
    if bits not in _LARGEST:
        raise ValueError(f"bits is {bits}; expected {' or '.join(map(str, _LARGEST))}.")
    return _LARGEST[bits]
