"""What any Trainer of memories may do beside: a balance loss, a log of usage, and an end to what is not finite."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from midus_hf.analysis.usage import Usage, record_usage, summarise
from midus_hf.training.optim.balance import record_readings
from midus_hf.training.optim.finite import error_of, first_gradient_not_finite
from midus_hf.training.trainer.trains_memory import TrainsMemory


class AidsMemory(TrainsMemory):
    """Mixin for a `Trainer` of any kind, as `TrainsMemory`, which it includes.

    Args:
        balance_loss: Coefficient of the balance loss of the memories, which is added to the loss in training alone.
            Default: 0.
        usage_every: Steps between log events that tell how memory slots are used. Default: none.
        kwargs: What `TrainsMemory` and the Trainer take.

    Raises:
        ValueError: If `balance_loss` is set where parameters are sharded: the loss reads keys outside the forward
            pass. If `usage_every` is set and `args.torch_compile`: what is counted runs uncompiled.
    """

    def __init__(
        self,
        *args: Any,
        balance_loss: float = 0.0,
        usage_every: int | None = None,
        **kwargs: Any,
    ):
        self.balance_loss = balance_loss
        super().__init__(*args, **kwargs)
        if balance_loss and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                f"balance_loss is {balance_loss}, which needs whole parameters; set it to 0, or train without sharding."
            )
        if usage_every is not None and self.args.torch_compile:
            raise ValueError(
                f"usage_every is {usage_every}, for which a model has to run uncompiled; leave it out, or torch_compile."
            )
        self._balance_losses: list[torch.Tensor] = []
        self._usage_events = None if usage_every is None else UsageEvents(usage_every)
        if self._usage_events is not None:
            self.add_callback(self._usage_events)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; the usage of memory slots is counted if it is to be logged."""
        self._balance_losses.clear()
        if self._usage_events is None:
            return super().train(*args, **kwargs)
        model: Any = self.model
        with record_usage(model, training_only=True) as usage:
            self._usage_events.usage = usage
            try:
                return super().train(*args, **kwargs)
            finally:
                self._usage_events.usage = None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """As `Trainer.compute_loss`, and in training the balance loss times its coefficient."""
        if not self.balance_loss or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with record_readings(model) as readings:
            result: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        balance = readings.balance_loss(self._mean_over_processes if self.args.world_size > 1 else None)
        self._balance_losses.append(balance.detach())
        # Where the loss is divided by the tokens of all passes of a step, what is a mean per pass has to be divided too.
        by_tokens = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        passes = self.current_gradient_accumulation_steps if by_tokens or self.compute_loss_func is not None else 1
        added = self.balance_loss / passes * balance
        return (result[0] + added, *result[1:]) if return_outputs else result + added

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """As `Trainer._get_grad_norm`, which is the last that is looked at before the optimizer's step.

        Where gradients are scaled for float16, those that are not finite are for the scaler to see, which leaves such a step out.

        Raises:
            FloatingPointError: If the norm of all gradients is not finite: the step would spoil all that trains.
        """
        norm: Any = super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]
        scales = self.accelerator.scaler is not None or self._dtype_of_deepspeed() == "float16"
        if norm is None or scales or math.isfinite(norm):
            return norm
        step, loss = self.state.global_step + 1, self._tr_loss.item()  # of all steps since the last event
        if not math.isfinite(loss):
            raise error_of(f"loss is {loss}", step)
        name = first_gradient_not_finite(model)
        raise error_of(f"gradient norm is {float(norm)}{f' (that of {name} is)' if name else ''}", step)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer.log`, with the rates of keys, values and memories; `learning_rate` is that of the first group.

        With them stand, if asked for, `balance_loss`, the mean since the last event and without its coefficient, and
        how memory slots were used.

        Raises:
            FloatingPointError: If the loss is not finite: what follows could only waste time and spoil checkpoints.
        """
        if not math.isfinite(logs.get("loss", 0.0)):
            raise error_of(f"loss is {logs['loss']}", self.state.global_step)
        if "loss" in logs and self._balance_losses:
            balance = torch.stack(self._balance_losses).mean()
            logs["balance_loss"] = self._mean_over_processes(balance).item()
            self._balance_losses.clear()
        if "loss" in logs and self._usage_events is not None:
            logs |= self._usage_events.measures(lambda counts: self.accelerator.reduce(counts, reduction="sum"))
        super().log(logs, start_time)

    def _mean_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        mean: Any = self.accelerator.reduce(tensor, reduction="mean")
        return mean


class UsageEvents(TrainerCallback):
    """Ask for a log event every so many steps, and say what it shall tell of the usage since the one before.

    Events also fall on the steps that save a checkpoint, so that those of a resumed run are those of the uninterrupted
    one.

    Args:
        every: Optimizer steps between events.
    """

    def __init__(self, every: int):
        self.every = every
        self.usage: Usage | None = None
        """What is counted; None while nothing is."""
        self._due = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.usage is not None and (state.global_step % self.every == 0 or control.should_save):
            self._due = control.should_log = True

    def measures(self, add_up: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """`memory_used_share` and `memory_perplexity`, means over memories of what `MemoryUsage` has; `{}` if not due.

        Args:
            add_up: Gives the sum of a tensor over all processes.
        """
        if self.usage is None or not self._due:
            return {}
        self._due = False
        memories = summarise({place: add_up(counts) for place, counts in self.usage.counts.items()}).values()
        self.usage.reset()
        return {
            "memory_used_share": statistics.fmean(memory.used for memory in memories),
            "memory_perplexity": statistics.fmean(memory.perplexity for memory in memories),
        }
