"""Additions to a Trainer of memories: a balance loss, a log of memory usage, and checks that numbers are finite."""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from midus_hf.look.usage import Usage, record_usage, summarise
from midus_hf.memory.balance import balance_loss
from midus_hf.memory.protocols import ScoresSubKeys
from midus_hf.ops.dispatch.private_torch import is_in_backward
from midus_hf.training.optim.finite import error_of, first_gradient_not_finite


class Aids:
    """Additions to a Trainer of memories: a balance loss, a log of memory usage, and checks that numbers are finite.

    Args:
        balance_loss: Coefficient of the balance loss of the memories, which is added to the loss only in training.
            Default: 0.
        usage_steps: Steps between log events on how memory slots are used. Default: None, usage is not logged.

    Raises:
        ValueError: If `balance_loss` is set and parameters are sharded, since the loss reads keys outside the forward
            pass. If `usage_steps` is set with `args.torch_compile`, since usage is counted only in an uncompiled model.
    """

    def __init__(self, trainer: Any, balance_loss: float = 0.0, usage_steps: int | None = None):
        self._trainer, self.balance_loss = trainer, balance_loss
        if balance_loss and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            raise ValueError(
                f"balance_loss is {balance_loss}, which needs whole parameters; set it to 0, or train without sharding."
            )
        if usage_steps is not None and trainer.args.torch_compile:
            raise ValueError(
                f"usage_steps is {usage_steps}, for which a model has to run uncompiled; leave it out, or torch_compile."
            )
        self._balance_losses: list[torch.Tensor] = []
        self._usage_events = None if usage_steps is None else UsageEvents(usage_steps)
        if self._usage_events is not None:
            trainer.add_callback(self._usage_events)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count the usage of memory slots inside the context, if usage is logged."""
        self._balance_losses.clear()
        if self._usage_events is None:
            yield
            return
        with record_usage(self._trainer.model, training_only=True) as usage:
            self._usage_events.usage = usage
            yield
        self._usage_events.usage = None

    def with_balance(self, model: nn.Module, compute: Callable[[], Any], is_per_token: bool) -> Any:
        """Compute a loss and, in training, add the balance loss times its coefficient.

        Args:
            compute: Returns the loss, or a tuple that begins with the loss.
            is_per_token: Whether the loss is divided by the tokens of all passes of a step.

        Returns:
            The result of `compute`, with the balance loss added to the loss.
        """
        if not self.balance_loss or not model.training:
            return compute()
        with record_readings(model) as readings:
            result = compute()
        trainer = self._trainer
        balance = readings.balance_loss(self._mean_over_processes if trainer.args.world_size > 1 else None)
        self._balance_losses.append(balance.detach())
        # If the loss is divided by the tokens of all passes, the balance loss, a mean per pass, is divided by the number of passes.
        by_tokens = trainer.model_accepts_loss_kwargs and is_per_token
        passes = (
            trainer.current_gradient_accumulation_steps if by_tokens or trainer.compute_loss_func is not None else 1
        )
        added = self.balance_loss / passes * balance
        return (result[0] + added, *result[1:]) if isinstance(result, tuple) else result + added

    def check_norm(self, model: nn.Module, norm: Any) -> None:
        """Check the norm of all gradients, the last check before the optimizer's step.

        If gradients are scaled for float16, nothing is checked: the gradient scaler itself skips a step whose gradients
        are not finite.

        Raises:
            FloatingPointError: If the norm is not finite, since the step would spoil everything that trains.
        """
        trainer = self._trainer
        scales = trainer.accelerator.scaler is not None or trainer.shards.dtype_of_deepspeed() == "float16"
        if norm is None or scales or math.isfinite(norm):
            return
        # _tr_loss is summed over the steps since the last log event.
        step, loss = trainer.state.global_step + 1, trainer._tr_loss.item()
        if not math.isfinite(loss):
            raise error_of(f"loss is {loss}", step)
        name = first_gradient_not_finite(model)
        raise error_of(f"gradient norm is {float(norm)}{f' (that of {name} is)' if name else ''}", step)

    def measures(self, logs: dict[str, float]) -> dict[str, float]:
        """Return further entries of a log event: `balance_loss`, the mean since the last event, and the use of slots.

        Raises:
            FloatingPointError: If the loss is not finite, since further steps would only waste time and spoil
                checkpoints.
        """
        if not math.isfinite(logs.get("loss", 0.0)):
            raise error_of(f"loss is {logs['loss']}", self._trainer.state.global_step)
        if "loss" not in logs:
            return {}
        measures: dict[str, float] = {}
        if self._balance_losses:
            balance = torch.stack(self._balance_losses).mean()
            measures["balance_loss"] = self._mean_over_processes(balance).item()
            self._balance_losses.clear()
        if self._usage_events is not None:
            accelerator = self._trainer.accelerator
            measures |= self._usage_events.measures(lambda counts: accelerator.reduce(counts, reduction="sum"))
        return measures

    def _mean_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        mean: Any = self._trainer.accelerator.reduce(tensor, reduction="mean")
        return mean


class UsageEvents(TrainerCallback):
    """Callback that requests log events on memory usage at intervals, and computes what each event says.

    Events also fall on the steps that save a checkpoint, so that a resumed run has the same events as an uninterrupted
    run.
    """

    def __init__(self, every: int):
        self.every = every
        # Counts of slot usage; None while nothing is counted.
        self.usage: Usage | None = None
        self._due = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.usage is not None and (state.global_step % self.every == 0 or control.should_save):
            self._due = control.should_log = True

    def measures(self, add_up: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return `memory_used_share` and `memory_perplexity`, means over memories; `{}` if no event is due.

        Args:
            add_up: Returns the sum of a tensor over all processes.
        """
        if self.usage is None or not self._due:
            return {}
        self._due = False
        memories = summarise({memory: add_up(counts) for memory, counts in self.usage.counts.items()}).values()
        self.usage.reset()
        return {
            "memory_used_share": statistics.fmean(memory.used for memory in memories),
            "memory_perplexity": statistics.fmean(memory.perplexity for memory in memories),
        }


@dataclasses.dataclass(frozen=True)
class Reading:
    """Input of a memory in one forward pass, and the autocast settings of that pass."""

    memory: ScoresSubKeys
    attention_output: torch.Tensor
    autocast: dict[str, Any]


class Readings:
    """Inputs of a model's memories in one or more forward passes."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []

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
        self.readings.append(Reading(memory, attention_output, autocast))

    def balance_loss(self, mean_over_processes: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """Return the mean of `memory.balance.balance_loss` over all recorded inputs, a scalar, float32 at least.

        Args:
            mean_over_processes: Averages a tensor over processes, as in `memory.balance.balance_loss`. Default: None,
                one process.

        Raises:
            ValueError: If no memory has read anything.
        """
        if not self.readings:
            raise ValueError(
                "no memory that selects sub-keys has read anything; expected a forward pass of a model with head-wise, product-key "
                "or linear memory. Set balance_loss to 0; routers of chapters have a separate load-balance loss."
            )
        losses = []
        for reading in self.readings:
            with torch.autocast(**reading.autocast):
                losses.append(balance_loss(reading.memory, reading.attention_output, mean_over_processes))
        return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


@contextlib.contextmanager
def record_readings(model: nn.Module) -> Iterator[Readings]:
    """Record, inside the context, the input of each memory of a model, wrapped or not, with its gradient graph.

    The loss is computed from these inputs after the forward pass. If the pass computed the loss, activation
    checkpointing would repeat this work.
    """
    readings = Readings()
    memories: list[Any] = [module for module in model.modules() if isinstance(module, ScoresSubKeys)]
    handles = [memory.register_forward_pre_hook(readings.record) for memory in memories]
    try:
        yield readings
    finally:
        for handle in handles:
            handle.remove()
