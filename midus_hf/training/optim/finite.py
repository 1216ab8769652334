"""Checks that losses, gradients and trained tensors are finite; otherwise the run ends before they are used or saved."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


class NotFiniteError(FloatingPointError):
    """Error of a run that reached numbers which are not finite, and ends without saving them."""


def error_of(quantity: str, step: int) -> NotFiniteError:
    """Return the error with which a run ends.

    Args:
        quantity: Beginning of the message, which says what is not finite: "loss is nan".
    """
    return NotFiniteError(
        f"{quantity} at step {step}; expected a finite number. Lower the learning rates, and resume from a checkpoint before that "
        "step."
    )


def first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return "NAME holds nan" for the first tensor that holds a number which is not finite, or None.

    Args:
        tensors: Names and tensors, of any shapes and dtypes. Tensors that processes share may be the shares of this
            process.
    """
    named = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not named or math.isfinite(nn.utils.get_total_norm([tensor for _, tensor in named], math.inf)):
        return None
    for name, tensor in named:
        value = tensor.abs().max().item()  # NaN if any number is NaN
        if not math.isfinite(value):
            return f"{name} holds {value}"
    return None


def trained_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of each parameter that trains, or this process's share of the tensor."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensor: Any = getattr(parameter, "ds_tensor", parameter).detach()
            yield name, tensor.to_local() if hasattr(tensor, "to_local") else tensor
