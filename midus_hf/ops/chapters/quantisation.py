"""Tables whose rows are stored as small integers, each with a scale of its own."""

import torch

_LARGEST = {8: 127, 4: 7}
"""The largest integer of each width, which the largest element of a row becomes."""

_LEAST_SCALE = 1e-8


def quantise_rows(table: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to integers between plus and minus the largest: absmax quantisation, symmetric.

    Args:
        table: `[N, W]`, floating point; W is even where two integers share a byte.
        bits: 8 or 4.

    Returns:
        `[N, W]`, int8, or `[N, W / 2]`, uint8, which holds the element of an even index in its low half; and scales `[N]`, float32.

    Raises:
        ValueError: If `bits` is neither, or the width is odd.
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
    """The rows that integers and scales stand for.

    Args:
        integers: `[..., W]`, int8, or `[..., W / 2]`, uint8.
        scales: `[...]`.
        bits: 8 or 4.
        dtype: Of the result, in which integers are multiplied by scales.

    Returns:
        `[..., W]`.

    Raises:
        ValueError: If `bits` is neither.
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
