"""Dtypes in which ops compute and store."""

import contextlib
import functools

import torch

_NOTHING = contextlib.nullcontext()


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Return a context in which `torch.autocast` does not lower matrix products to half precision.

    Args:
        device_type: Device type of the tensors that are multiplied. `"meta"` computes nothing and has no autocast to
            disable.
    """
    # The name is compared because Dynamo of torch 2.11 cannot trace `torch.amp.is_autocast_available`.
    if device_type == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type)):
        return _NOTHING  # entering an autocast context takes as long as some ten operations on a GPU
    return torch.autocast(device_type, enabled=False)


def narrowest_integer(bound: int) -> torch.dtype:
    """Return the narrowest of int16, int32 and int64 that holds `bound`: narrow integers take less space and sort faster."""
    return next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if bound <= torch.iinfo(dtype).max)


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which sums over elements of a tensor are computed: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def shared_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype in which kernels read all of the tensors.

    If their dtypes differ under autocast, the result is the dtype of autocast, as in PyTorch's attention; otherwise it
    is the dtype to which all their dtypes promote.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    device = tensors[0].device.type
    if len(dtypes) > 1 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return functools.reduce(torch.promote_types, dtypes)
