"""What any Trainer needs to train memories as MIDUS does: parameter groups, and a course of the rate for each."""

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from midus_hf.training.options import ValueSchedule, ValueTransforms
from midus_hf.training.parameter_groups import group_schedules, parameter_groups


class TrainsMemory:
    """Mixin for a `Trainer` of any kind: keys and values keep a constant rate, or values a course of their own.

    It stands before the class that it is mixed into, as in `class MemorySFTTrainer(TrainsMemory, SFTTrainer)`. The
    optimizer, the maximum rate, the weight decay, the warm-up and the schedule of everything else are those of the
    `TrainingArguments`. Groups and scheduler are made where the Trainer makes its own, so what is wrapped or sharded
    before that is seen as it is then.

    Args:
        key_value_learning_rate: Rate of keys and values. Default: `args.learning_rate`.
        value_learning_rate: Rate of values alone. Default: `key_value_learning_rate`.
        value_schedule: As in `TrainConfig`. Default: `"constant"`.
        value_transforms: As in `TrainConfig`. Default: `"weights"`.
        kwargs: What the Trainer takes.
    """

    # What the Trainer that this is mixed into provides.
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: Any
    get_optimizer_cls_and_kwargs: Any

    def __init__(
        self,
        *args: Any,
        key_value_learning_rate: float | None = None,
        value_learning_rate: float | None = None,
        value_schedule: ValueSchedule = "constant",
        value_transforms: ValueTransforms = "weights",
        **kwargs: Any,
    ):
        self.key_value_learning_rate = key_value_learning_rate
        self.value_learning_rate = value_learning_rate
        self.value_schedule: ValueSchedule = value_schedule
        self.value_transforms: ValueTransforms = value_transforms
        super().__init__(*args, **kwargs)
        self._rates = _RatesOfStep()
        self.add_callback(self._rates)  # type: ignore[attr-defined]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As `Trainer.create_optimizer`, on the groups of `parameter_groups`."""
        if self.optimizer is None:
            target = self.model if model is None else model
            groups = parameter_groups(
                target,
                learning_rate=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                key_value_learning_rate=self.key_value_learning_rate,
                value_learning_rate=self.value_learning_rate,
                value_schedule=self.value_schedule,
                value_transforms=self.value_transforms,
            )
            given = self.optimizer_cls_and_kwargs
            optimizer_class, options = given or self.get_optimizer_cls_and_kwargs(self.args, target)
            self.optimizer = optimizer_class(groups, **options)
        return super().create_optimizer(model)  # type: ignore[misc]

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """As `Trainer.create_scheduler`, with one course per group."""
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
        """As `Trainer.log`, with the rates of keys and values; `learning_rate` is that of everything else."""
        if "learning_rate" in logs:
            logs |= {f"learning_rate_{name}": rate for name, rate in self._rates.of_keys_and_values.items()}
        super().log(logs, start_time)  # type: ignore[misc]


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
            if group.get("name") not in (None, "decay", "no_decay")
        }
