"""Triton where it is installed, and what launching a kernel needs beside the kernel.

Where Triton is absent, its names let kernels be defined, though not run.
"""

import contextlib
import functools
import os
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Absent:
        """Stands for a module whose decorators leave functions alone."""

        constexpr: Any = None

        @staticmethod
        def jit(function: Any) -> Any:
            return function

    triton = tl = _Absent


def interprets_kernels() -> bool:
    """Whether triton's interpreter runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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


@triton.jit
def product(first, second, PRECISION: tl.constexpr):
    """A matrix product accumulated in float32: in the dtype of `second`, or in float32 where `PRECISION` says how."""
    if PRECISION is None:
        return tl.dot(first.to(second.dtype), second)
    else:
        return tl.dot(first.to(tl.float32), second.to(tl.float32), input_precision=PRECISION)


def product_precision(tensor: torch.Tensor) -> str | None:
    """As `product` takes it: none for half precision, which tensor cores multiply as it is, and the interpreter does not."""
    return precise_product() if tensor.dtype == torch.float32 or interprets_kernels() else None
