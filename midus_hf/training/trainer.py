"""Transformers' Trainer with the parameter groups and rates, the loss and the log of a memory model."""

import math
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from midus_hf.analysis.usage import record_usage
from midus_hf.training.balance import record_readings
from midus_hf.training.options import ValueSchedule
from midus_hf.training.parameter_groups import group_schedules, parameter_groups
from midus_hf.training.usage_events import UsageEvents


class MemoryTrainer(Trainer):
    """A `Trainer` whose memory keys keep a constant rate, and its values that or a course of their own.

    The maximum rate, the weight decay, the warm-up and the schedule of everything else are those of the
    `TrainingArguments`. All else is the Trainer's own.

    Args:
        key_value_learning_rate: Rate of keys and values. Default: `args.learning_rate`.
        value_learning_rate: Rate of values alone. Default: `key_value_learning_rate`.
        value_schedule: As in `TrainConfig`. Default: `"constant"`.
        balance_loss: Coefficient of the balance loss of the memories, which is added to the loss in training alone.
            Default: 0.
        usage_every: Steps between log events that tell how memory slots are used. Default: none.
        kwargs: What a `Trainer` takes.

    Raises:
        ValueError: If `balance_loss` is set where parameters are sharded: the loss reads keys outside the forward
            pass.
    """

    def __init__(
        self,
        *args: Any,
        key_value_learning_rate: float | None = None,
        value_learning_rate: float | None = None,
        value_schedule: ValueSchedule = "constant",
        balance_loss: float = 0.0,
        usage_every: int | None = None,
        **kwargs: Any,
    ):
        self.key_value_learning_rate = key_value_learning_rate
        self.value_learning_rate = value_learning_rate
        self.value_schedule: ValueSchedule = value_schedule
        self.balance_loss = balance_loss
        super().__init__(*args, **kwargs)
        if balance_loss and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                f"balance_loss is {balance_loss}, which needs whole parameters; set it to 0, or train without sharding."
            )
        self._balance_losses: list[torch.Tensor] = []
        self._rates = _RatesOfStep()
        self.add_callback(self._rates)
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

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As `Trainer.create_optimizer`, on the groups of `parameter_groups`."""
        if self.optimizer is None:
            target: Any = self.model if model is None else model
            groups = parameter_groups(
                target,
                learning_rate=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                key_value_learning_rate=self.key_value_learning_rate,
                value_learning_rate=self.value_learning_rate,
                value_schedule=self.value_schedule,
            )
            optimizer_class, optimizer_kwargs = self.get_optimizer_cls_and_kwargs(self.args, target)
            self.optimizer = optimizer_class(groups, **optimizer_kwargs)
        return super().create_optimizer(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """As `Trainer.create_scheduler`, with one course a group."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            assert optimizer is not None
            self.lr_scheduler = group_schedules(
                optimizer,
                schedule=self.args.lr_scheduler_type,
                warmup_steps=self.args.get_warmup_steps(num_training_steps),
                total_steps=num_training_steps,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

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
        balance = readings.balance_loss()
        self._balance_losses.append(balance.detach())
        # Where the loss is divided by the tokens of all passes of a step, what is a mean a pass has to be divided too.
        by_tokens = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        passes = self.current_gradient_accumulation_steps if by_tokens or self.compute_loss_func is not None else 1
        added = self.balance_loss / passes * balance
        return (result[0] + added, *result[1:]) if return_outputs else result + added

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer.log`, with the rates of keys and values; `learning_rate` is that of everything else.

        With them stand, if asked for, `balance_loss`, the mean since the last event and without its coefficient, and
        how memory slots were used.

        Raises:
            FloatingPointError: If the loss is not finite: what follows could only waste time and spoil checkpoints.
        """
        if not math.isfinite(logs.get("loss", 0.0)):
            raise FloatingPointError(
                f"loss is {logs['loss']} at step {self.state.global_step}; expected a finite number. Lower the learning "
                "rates, and resume from a checkpoint before that step."
            )
        if "learning_rate" in logs:
            logs |= {f"learning_rate_{name}": rate for name, rate in self._rates.of_keys_and_values.items()}
        if "loss" in logs and self._balance_losses:
            balance = torch.stack(self._balance_losses).mean()
            logs["balance_loss"] = self.accelerator.reduce(balance, reduction="mean").item()
            self._balance_losses.clear()
        if "loss" in logs and self._usage_events is not None:
            logs |= self._usage_events.measures(lambda counts: self.accelerator.reduce(counts, reduction="sum"))
        super().log(logs, start_time)


class _RatesOfStep(TrainerCallback):
    """The rates that keys and values had in the last step: when it is logged, the schedule has moved on."""

    def __init__(self) -> None:
        self.of_keys_and_values: dict[str, float] = {}

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        assert optimizer is not None
        self.of_keys_and_values = {
            group["name"]: group["lr"]
            for group in optimizer.param_groups
            if group["name"] not in ("decay", "no_decay")
        }
