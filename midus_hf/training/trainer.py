"""Transformers' Trainer with the parameter groups and rates of a memory model."""

import math
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from midus_hf.training.parameter_groups import group_schedules, parameter_groups


class MemoryTrainer(Trainer):
    """A `Trainer` whose memory keys and values keep a constant rate.

    The maximum rate, the weight decay, the warm-up and the schedule of everything else are those of the
    `TrainingArguments`. All else is the Trainer's own.

    Args:
        key_value_learning_rate: Rate of keys and values. Default: `args.learning_rate`.
        value_learning_rate: Rate of values alone. Default: `key_value_learning_rate`.
        kwargs: What a `Trainer` takes.
    """

    def __init__(
        self,
        *args: Any,
        key_value_learning_rate: float | None = None,
        value_learning_rate: float | None = None,
        **kwargs: Any,
    ):
        self.key_value_learning_rate = key_value_learning_rate
        self.value_learning_rate = value_learning_rate
        super().__init__(*args, **kwargs)

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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer.log`, with the constant rates; `learning_rate` is that of everything else.

        Raises:
            FloatingPointError: If the loss is not finite: what follows could only waste time and spoil checkpoints.
        """
        if not math.isfinite(logs.get("loss", 0.0)):
            raise FloatingPointError(
                f"loss is {logs['loss']} at step {self.state.global_step}; expected a finite number. Lower the learning "
                "rates, and resume from a checkpoint before that step."
            )
        if "learning_rate" in logs and self.optimizer is not None:
            constant = {g["name"]: g["lr"] for g in self.optimizer.param_groups if not g["scheduled"]}
            logs |= {f"learning_rate_{name}": rate for name, rate in constant.items()}
        super().log(logs, start_time)
