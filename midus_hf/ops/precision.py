"""Dtypes that ops insist on."""

import contextlib

import torch


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """A context in which `torch.autocast` does not lower matrix products to half precision."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def narrowest_integer(bound: int) -> torch.dtype:
    """The narrowest of int16, int32 and int64 that holds `bound`: less to store, and faster to sort."""
    return next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if bound <= torch.iinfo(dtype).max)
