"""Whole numbers that the host knows and kernels read: addresses and strides of tensors, as many as there are.

They travel as arguments of a kernel that writes them down. A copy from the host's memory would have to wait for the device or to
outlive it, and a captured graph would read that memory again when it is replayed; arguments are part of the launch.
"""

from collections.abc import Sequence

import torch

from midus_hf.ops.triton_import import tl, triton
from midus_hf.ops.triton_launch import on_device_of, power_of_two

_MOST_A_LAUNCH = 256
"""Numbers that one launch writes: 2 KB of arguments, of the 4 KB that any GPU takes."""

_FEWEST_A_LAUNCH = 16
"""Few numbers are padded to as many: the kernel is compiled for each power of two in between."""

_ABOVE = 1 << 62
"""Added to what is passed. Triton compiles anew for a whole number that is 1, or even 16-fold, or fits into 32 bits: odd numbers of
64 bits are all alike."""


@triton.jit
def write_numbers_kernel(numbers, into, COUNT: tl.constexpr):
    """Numbers of a tuple, doubled and raised by 2^62 + 1, as they were: [COUNT]."""
    for place in tl.static_range(COUNT):
        tl.store(into + place, (numbers[place] - 4611686018427387905) // 2)


def device_numbers(numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Numbers where a tensor is, without waiting for its device.

    Args:
        numbers: Between -2^60 and 2^60, one or more.
        like: On the device.

    Returns:
        `[n]`, int64.
    """
    sizes = [min(_MOST_A_LAUNCH, len(numbers) - start) for start in range(0, len(numbers), _MOST_A_LAUNCH)]
    padded = (len(sizes) - 1) * _MOST_A_LAUNCH + max(_FEWEST_A_LAUNCH, power_of_two(sizes[-1]))
    written = torch.empty(padded, dtype=torch.int64, device=like.device)
    passed = [2 * number + 1 + _ABOVE for number in numbers] + [1 + _ABOVE] * (padded - len(numbers))
    with on_device_of(like):
        for start in range(0, padded, _MOST_A_LAUNCH):
            part = tuple(passed[start : start + _MOST_A_LAUNCH])
            write_numbers_kernel[(1,)](part, written[start:], COUNT=len(part), num_warps=1)
    return written[: len(numbers)]
