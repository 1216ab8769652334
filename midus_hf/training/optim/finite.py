"""Checks that losses, gradients and trained tensors are finite; otherwise the run ends before they are used or saved."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


class NotFiniteError(FloatingPointError):
    """Error of a run that reached numbers which are not finite, and ends without saving them."""


def error_of(what: str, step: int) -> NotFiniteError:
    """Return the error with which a run ends.

    Args:
        what: Beginning of the message, which says what is not finite: "loss is nan".
    """
    return NotFiniteError(
        f"{what} at step {step}; expected a finite number. Lower the learning rates, and resume from a checkpoint before that "
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


def first_gradient_not_finite(model: nn.Module) -> str | None:
    """Return the name of the first parameter whose gradient has numbers that are not finite.

    Return None if every gradient is finite. Return None, too, if no gradient is finite, as after clipping by a norm
    that is NaN: then it is unknown which gradient was the first.
    """
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None)
    shares = [
        (name, _share(gradient.coalesce().values() if gradient.is_sparse else gradient))
        for name, gradient in gradients
    ]
    not_finite = [name for name, share in shares if first_not_finite([(name, share)]) is not None]
    return not_finite[0] if 0 < len(not_finite) < len(shares) else None


def trained_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of each parameter that trains, or this process's share of the tensor."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, _share(getattr(parameter, "ds_tensor", parameter).detach())


def _share(tensor: Any) -> torch.Tensor:
    """Return the part that this process holds of a tensor that FSDP may have cut."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
