"""Dtypes that ops insist on."""

import contextlib
import functools

import torch

_NOTHING = contextlib.nullcontext()


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """A context in which `torch.autocast` does not lower matrix products to half precision.

    Args:
        device_type: Of the tensors that are multiplied; `"meta"`, which computes nothing, has no autocast to disable.
    """
    # By name, not by `torch.amp.is_autocast_available`, which Dynamo of torch 2.11 cannot trace.
    if device_type == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type)):
        return _NOTHING  # a context of autocast costs as much as some ten operations on a GPU
    return torch.autocast(device_type, enabled=False)


def narrowest_integer(bound: int) -> torch.dtype:
    """The narrowest of int16, int32 and int64 that holds `bound`: less to store, and faster to sort."""
    return next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if bound <= torch.iinfo(dtype).max)


def shared_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """In which kernels read all of them; where they differ under autocast, in its own, as PyTorch's attention does."""
    dtypes = {tensor.dtype for tensor in tensors}
    device = tensors[0].device.type
    if len(dtypes) > 1 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return functools.reduce(torch.promote_types, dtypes)
