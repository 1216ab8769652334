"""Sizes of parameters, including parameters that DeepSpeed's ZeRO-3 has cut, which are empty unless they are in use."""

import torch


def is_cut(parameter: torch.Tensor) -> bool:
    """Return whether ZeRO-3 has cut the parameter, so that each process holds a part."""
    return hasattr(parameter, "ds_shape")


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape that the parameter has, or had before ZeRO-3 cut it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def whole_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of the parameter in all processes together."""
    return getattr(parameter, "ds_numel", parameter.numel())
