"""The balance loss of memories, which the Trainer adds to the loss in training (Switch Transformer, equation 4)."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from midus_hf.memory.balance import balance_loss
from midus_hf.memory.protocols import ScoresSubKeys
from midus_hf.ops.dispatch.private_torch import is_in_backward


class BalanceLoss:
    """The balance loss of a Trainer's memories, added to the loss with a coefficient, in training only.

    Raises:
        ValueError: If the coefficient is not 0 and parameters are sharded, since the loss reads keys outside the forward
            pass.
    """

    def __init__(self, trainer: Any, coefficient: float):
        self._trainer, self.coefficient = trainer, coefficient
        if coefficient and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            raise ValueError(
                f"balance_loss is {coefficient}, which needs whole parameters; set it to 0, or train without sharding."
            )
        self._losses: list[torch.Tensor] = []

    def added_to(self, model: nn.Module, compute: Callable[[], Any], is_per_token: bool) -> Any:
        """Compute a loss and, in training, add the balance loss times its coefficient.

        Args:
            compute: Returns the loss, or a tuple that begins with the loss.
            is_per_token: Whether the loss is divided by the tokens of all passes of a step.

        Returns:
            The result of `compute`, with the balance loss added to the loss.
        """
        if not self.coefficient or not model.training:
            return compute()
        with record_readings(model) as readings:
            result = compute()
        trainer = self._trainer
        balance = mean_balance(readings, self._mean_over_processes if trainer.args.world_size > 1 else None)
        self._losses.append(balance.detach())
        # A loss divided by the tokens of all passes is added up over the passes, so this mean of a pass is divided by their number.
        by_tokens = trainer.model_accepts_loss_kwargs and is_per_token
        passes = (
            trainer.current_gradient_accumulation_steps if by_tokens or trainer.compute_loss_func is not None else 1
        )
        added = self.coefficient / passes * balance
        return (result[0] + added, *result[1:]) if isinstance(result, tuple) else result + added

    def measures(self) -> dict[str, float]:
        """Return `balance_loss`, the mean since the last call without the coefficient; `{}` if there was none."""
        if not self._losses:
            return {}
        mean = torch.stack(self._losses).mean()
        self._losses.clear()
        return {"balance_loss": self._mean_over_processes(mean).item()}

    def _mean_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        mean: Any = self._trainer.accelerator.reduce(tensor, reduction="mean")
        return mean


# A memory, its input in one forward pass, and the autocast settings of that pass.
Reading = tuple[Any, torch.Tensor, dict[str, Any]]


@contextlib.contextmanager
def record_readings(model: nn.Module) -> Iterator[list[Reading]]:
    """Record, inside the context, the input of each memory of a model, wrapped or not, with its gradient graph.

    The loss is computed from these inputs after the forward pass. If the pass computed the loss, activation
    checkpointing would repeat this work. Recomputations in the backward pass are not recorded.

    Raises:
        ValueError: If a memory trains, but gradients are disabled.
    """
    readings: list[Reading] = []

    def record(memory: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if is_in_backward():
            return
        if memory.training and not torch.is_grad_enabled():
            raise ValueError(
                "balance_loss found a forward pass of training without gradients, as reentrant activation checkpointing runs; "
                "expected gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        device_type = arguments[0].device.type
        autocast = {
            "device_type": device_type,
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
        }
        readings.append((memory, arguments[0], autocast))

    memories: list[Any] = [module for module in model.modules() if isinstance(module, ScoresSubKeys)]
    handles = [memory.register_forward_pre_hook(record) for memory in memories]
    try:
        yield readings
    finally:
        for handle in handles:
            handle.remove()


def mean_balance(
    readings: list[Reading], mean_over_processes: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the mean of `memory.balance.balance_loss` over all recorded inputs, a scalar, float32 at least.

    Args:
        mean_over_processes: Averages a tensor over processes, as in `memory.balance.balance_loss`. Default: None,
            one process.

    Raises:
        ValueError: If no memory has read anything.
    """
    if not readings:
        raise ValueError(
            "no memory that selects sub-keys has read anything; expected a forward pass of a model with head-wise, product-key "
            "or linear memory. Set balance_loss to 0; routers of chapters have a separate load-balance loss."
        )
    losses = []
    for memory, attention_output, autocast in readings:
        with torch.autocast(**autocast):
            losses.append(balance_loss(memory, attention_output, mean_over_processes))
    return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()
