"""What any Trainer needs to train memories as MIDUS does: parameter groups, and a course of the rate for each."""

from typing import Any

import torch
from torch import nn
from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from midus_hf.training.optim.parameter_groups import (
    group_schedules,
    parameter_groups,
    schedule_factor,
    schedule_groups,
)
from midus_hf.training.optim.rates import Rates
from midus_hf.training.optim.tied_tensors import really_missing
from midus_hf.training.trainer.trains_tables import TrainsTables


class TrainsMemory(TrainsTables):
    """Mixin for a `Trainer` of any kind: keys and values keep a constant rate, or values a course of their own.

    It stands before the class that it is mixed into, as in `class MemorySFTTrainer(TrainsMemory, SFTTrainer)`. The
    optimizer is that of the `TrainingArguments`. Groups and scheduler are made where the Trainer makes its own, so what
    is wrapped or sharded before that is seen as it is then.

    Args:
        rates: Rates, decay, warm-up and schedule, which are written into the `TrainingArguments` as far as these have
            them. Default: none, and the `TrainingArguments` say the maximum rate of all tensors, the decay, the warm-up
            and the schedule.
        kwargs: What `TrainsTables` and the Trainer take.
    """

    def __init__(self, *args: Any, rates: Rates | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rates = rates
        if rates is not None:
            # What reads the arguments, such as a tracker or DeepSpeed, is to see what is done.
            self.args.learning_rate, self.args.weight_decay = rates.learning_rate, rates.weight_decay
            self.args.lr_scheduler_type = SchedulerType(rates.scheduler_type)
            self.args.warmup_steps = rates.warmup_ratio
        self._rates_of_step = _RatesOfStep()
        self.add_callback(self._rates_of_step)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As `Trainer.create_optimizer`, on the groups of `parameter_groups`."""
        if self.optimizer is None:
            target: Any = self.model if model is None else model
            rates = self.rates or Rates(learning_rate=self.args.learning_rate, weight_decay=self.args.weight_decay)
            groups = parameter_groups(target, rates)
            given = self.optimizer_cls_and_kwargs
            optimizer_class, options = given or self.get_optimizer_cls_and_kwargs(self.args, target)
            self.optimizer = self.get_optimizer_class(optimizer_class)(groups, **options)
            self.follow_optimizer(self.optimizer)
        return super().create_optimizer(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """As `Trainer.create_scheduler`, with one course per group."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            assert optimizer is not None
            if self.rates is not None:
                self.lr_scheduler = group_schedules(optimizer, self.rates, num_training_steps)
            else:
                options: Any = self.args.lr_scheduler_kwargs
                factor = schedule_factor(
                    self.args.lr_scheduler_type,
                    self.args.get_warmup_steps(num_training_steps),
                    num_training_steps,
                    options,
                )
                self.lr_scheduler = schedule_groups(optimizer, factor, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer.log`, with the rates of keys, values and memories; `learning_rate` is that of the first group."""
        if "learning_rate" in logs:
            logs |= {f"learning_rate_{name}": rate for name, rate in self._rates_of_step.by_group.items()}
        super().log(logs, start_time)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As the Trainer's; what a checkpoint has under another name, as tied embeddings, is not missing."""
        assert isinstance(self.model, nn.Module)
        missing = really_missing(self.model, load_result.missing_keys)
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))  # type: ignore[misc]


class _RatesOfStep(TrainerCallback):
    """The rates that groups of memories had in the last step: when it is logged, the schedule has moved on."""

    def __init__(self) -> None:
        self.by_group: dict[str, float] = {}

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        assert optimizer is not None
        self.by_group = {
            group["name"]: group["lr"]
            for group in optimizer.param_groups
            if not group.get("name", "decay").endswith("decay")
        }
