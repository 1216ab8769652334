"""What launching a kernel needs beside the kernel."""

import contextlib
import functools

import torch


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, which must be positive."""
    return 1 << (number - 1).bit_length()


def quotient_above(number: int, divisor: int) -> int:
    """`number / divisor`, rounded up; `triton.cdiv`, which kernels may call as well, takes the host 2 us."""
    return -(-number // divisor)


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which kernels are launched on the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def multiprocessors(tensor: torch.Tensor) -> int:
    """How many the tensor's device has: as many as an H200 where it is no GPU."""
    return _multiprocessors(tensor.device) if tensor.is_cuda else 132


@functools.lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def precise_product() -> str:
    """How `tl.dot` multiplies float32 to nearly float32: three products on tensor cores, or none where there is no such way."""
    return "ieee" if torch.version.hip else "tf32x3"


def wide_ranged_product() -> str:
    """How `tl.dot` multiplies what exceeds the range of float16, to about its precision: as TF32, which not every AMD GPU has."""
    return "ieee" if torch.version.hip else "tf32"
