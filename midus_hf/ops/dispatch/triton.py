"""Triton, or stand-ins with which kernels can be defined, but not run; and what a launch needs."""

import contextlib
import os
from typing import Any

import torch

# Parameters of a kernel and compiler options, by name. They are computed from a shape and cached, so they must not be modified.
Tile = dict[str, Any]

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Absent:
        """Stand-in for a module whose decorators do not change functions."""

        constexpr: Any = None

        @staticmethod
        def jit(function: Any) -> Any:
            return function

    triton = tl = _Absent


def interprets_kernels() -> bool:
    """Return whether Triton's interpreter runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which must be positive."""
    return 1 << (number - 1).bit_length()


def quotient_above(number: int, divisor: int) -> int:
    """Return `number / divisor`, rounded up. `triton.cdiv` takes the host 2 us per call."""
    return -(-number // divisor)


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Return a context in which kernels are launched on the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def precise_product() -> str:
    """Return the `input_precision` nearest float32: `"tf32x3"`, and `"ieee"` on AMD GPUs."""
    return "ieee" if torch.version.hip else "tf32x3"


def wide_ranged_product() -> str:
    """Return the `input_precision` near float16's for any range: `"tf32"`, and `"ieee"` on AMD GPUs."""
    return "ieee" if torch.version.hip else "tf32"


@triton.jit
def product(first, second, PRECISION: tl.constexpr):
    """Return a product in float32: factors as `second`, or float32 with the input precision `PRECISION`."""
    if PRECISION is None:
        return tl.dot(first.to(second.dtype), second)
    else:
        return tl.dot(first.to(tl.float32), second.to(tl.float32), input_precision=PRECISION)


def product_precision(tensor: torch.Tensor) -> str | None:
    """Return the `PRECISION` of `product`: None for half precision, except in the interpreter."""
    return precise_product() if tensor.dtype == torch.float32 or interprets_kernels() else None
