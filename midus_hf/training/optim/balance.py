"""Balance loss of a model's memories in one forward pass."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from midus_hf.memory.balance import balance_loss
from midus_hf.memory.protocols import ScoresSubKeys
from midus_hf.ops.dispatch.private_torch import is_in_backward


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Input of a memory in one forward pass, and the autocast settings of that pass."""

    memory: ScoresSubKeys
    attention_output: torch.Tensor
    autocast: dict[str, Any]


class Readings:
    """Inputs of a model's memories in one or more forward passes."""

    def __init__(self) -> None:
        self._readings: list[_Reading] = []

    def record(self, memory: ScoresSubKeys, arguments: tuple[torch.Tensor, ...]) -> None:
        """Record the input of a memory, as a forward pre-hook; ignore recomputations in the backward pass.

        Raises:
            ValueError: If the memory trains, but gradients are disabled.
        """
        if is_in_backward():
            return
        if memory.training and not torch.is_grad_enabled():
            raise ValueError(
                "balance_loss found a forward pass of training without gradients, as reentrant activation checkpointing runs; "
                "expected gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        attention_output = arguments[0]
        device_type = attention_output.device.type
        autocast = {
            "device_type": device_type,
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
        }
        self._readings.append(_Reading(memory, attention_output, autocast))

    def balance_loss(self, mean_over_processes: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """Return the mean of `memory.balance.balance_loss` over all recorded inputs, a scalar, float32 at least.

        Args:
            mean_over_processes: Averages a tensor over processes, as in `memory.balance.balance_loss`. Default: None,
                one process.

        Raises:
            ValueError: If no memory has read anything.
        """
        if not self._readings:
            raise ValueError(
                "no memory that selects sub-keys has read anything; expected a forward pass of a model with head-wise, product-key "
                "or linear memory. Set balance_loss to 0; routers of chapters have a separate load-balance loss."
            )
        losses = []
        for reading in self._readings:
            with torch.autocast(**reading.autocast):
                losses.append(balance_loss(reading.memory, reading.attention_output, mean_over_processes))
        return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


@contextlib.contextmanager
def record_readings(model: nn.Module) -> Iterator[Readings]:
    """Record, inside the context, the input of each memory of a model, with its gradient graph.

    The loss is computed from these inputs after the forward pass. If the pass computed the loss, activation
    checkpointing would repeat this work.

    Args:
        model: A model, wrapped or not. Its memory modules have an additional forward pre-hook inside the context.
    """
    readings = Readings()
    memories: list[Any] = [module for module in model.modules() if isinstance(module, ScoresSubKeys)]
    handles = [memory.register_forward_pre_hook(readings.record) for memory in memories]
    try:
        yield readings
    finally:
        for handle in handles:
            handle.remove()
