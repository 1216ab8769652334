"""Matrix products in kernels."""

import torch

from midus_hf.ops.backend import interprets_kernels
from midus_hf.ops.triton_import import tl, triton
from midus_hf.ops.triton_launch import precise_product


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
