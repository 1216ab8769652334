"""Numerical precision that ops insist on."""

import contextlib

import torch


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """A context in which `torch.autocast` does not lower matrix products to half precision."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
