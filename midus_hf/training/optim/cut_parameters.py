"""Sizes of parameters, also of those that DeepSpeed's ZeRO-3 has cut, which are empty but where they are needed."""

import torch


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether processes share it by ZeRO-3."""
    return hasattr(parameter, "ds_shape")


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Its shape before it was cut, if it was."""
    return getattr(parameter, "ds_shape", parameter.shape)


def whole_numel(parameter: torch.Tensor) -> int:
    """How many numbers it has in all processes together."""
    return getattr(parameter, "ds_numel", parameter.numel())
