"""What is not finite ends a run before it is used or saved: losses, gradients, and tensors that train."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from midus_hf.files.checkpoint_files import ADAPTERS, PARTS_OF_WEIGHTS, WEIGHTS, globs


class NotFiniteError(FloatingPointError):
    """A run has come to numbers that are not finite, and ends without saving them."""


def error_of(what: str, step: int) -> NotFiniteError:
    """Return the error with which a run ends.

    Args:
        what: What is not finite, as the beginning of a sentence: "loss is nan".
        step: The optimizer step at which it was seen.
    """
    return NotFiniteError(
        f"{what} at step {step}; expected a finite number. Lower the learning rates, and resume from a checkpoint before that "
        "step."
    )


def first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return "NAME holds nan" of the first tensor that holds a number which is not finite, or None.

    Args:
        tensors: Names and tensors, of any shapes and dtypes; those of a tensor that processes share may be their shares.
    """
    named = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not named or math.isfinite(nn.utils.get_total_norm([tensor for _, tensor in named], math.inf)):
        return None
    for name, tensor in named:
        value = tensor.abs().max().item()  # the largest is nan if any is
        if not math.isfinite(value):
            return f"{name} holds {value}"
    return None


def first_gradient_not_finite(model: nn.Module) -> str | None:
    """Return the name of the first parameter whose gradient has numbers that are not finite.

    None if there is none, or if all gradients have some, as after clipping by a norm that is nan: then nobody knows which was first.

    Args:
        model: The model, after a backward pass.
    """
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None)
    shares = [
        (name, _share(gradient.coalesce().values() if gradient.is_sparse else gradient))
        for name, gradient in gradients
    ]
    not_finite = [name for name, share in shares if first_not_finite([(name, share)]) is not None]
    return not_finite[0] if 0 < len(not_finite) < len(shares) else None


def trained_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that train, and of those that processes share the share of this one.

    Args:
        model: The model, as it trains.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, _share(getattr(parameter, "ds_tensor", parameter).detach())


def first_not_finite_in(checkpoint: Path, frozen: Iterable[str]) -> str | None:
    """Return "NAME holds nan" of the first tensor in the weights of a checkpoint that trains and is not finite, or None.

    Args:
        checkpoint: The folder of a checkpoint.
        frozen: Names of tensors that do not train, which may be what they are.
    """
    left_out = frozenset(frozen)
    for path in sorted(
        path for pattern in globs((*WEIGHTS, *PARTS_OF_WEIGHTS, *ADAPTERS)) for path in checkpoint.glob(pattern)
    ):
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, "pt") as file:
            for name in file.keys():
                found = None if name in left_out else first_not_finite([(name, file.get_tensor(name))])
                if found is not None:
                    return found
    return None


def _share(tensor: Any) -> torch.Tensor:
    """Return what this process has of a tensor that FSDP may have cut."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
