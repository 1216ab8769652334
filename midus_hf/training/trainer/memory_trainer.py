"""Transformers' Trainer for memories: parameter groups, a course of the rate per group, and further parts."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import SchedulerType, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from midus_hf.training.optim.parameter_groups import (
    group_schedules,
    parameter_groups,
    schedule_factor,
    schedule_groups,
)
from midus_hf.training.optim.rates import Rates
from midus_hf.training.optim.row_adamw import RowAdamW
from midus_hf.training.optim.tensors import really_missing
from midus_hf.training.trainer.aids import Aids
from midus_hf.training.trainer.blocks import Blocks
from midus_hf.training.trainer.shards import Shards
from midus_hf.training.trainer.tables import Tables

if TYPE_CHECKING:
    # For type checkers: the mixin calls the methods of the Trainer that it is mixed into.
    from transformers import Trainer as AnyTrainer
else:
    AnyTrainer = object


class TrainsMemory(AnyTrainer):
    """Mixin for any kind of `Trainer`: memory keys and values keep a constant rate, or values follow a separate course.

    Put the mixin before the class that it extends, as in `class MemorySFTTrainer(TrainsMemory, SFTTrainer)`. The
    `TrainingArguments` choose the optimizer. Groups and scheduler are made where the Trainer makes its own, so they see
    the model after it was wrapped or sharded. The Trainer leaves all else to parts: `shards` (parameters that FSDP or
    DeepSpeed shard), `blocks` (which texts fetch), `tables` (of which few rows are read) and `aids`.

    Args:
        rates: Rates, decay, warm-up and schedule, which are copied into the `TrainingArguments` where these have a
            field for them. Default: None, the `TrainingArguments` give the maximum rate of all tensors, the decay, the
            warm-up and the schedule.
        balance_loss: Coefficient of the balance loss, as in `Aids`. Default: 0.
        usage_steps: Steps between log events on memory usage, as in `Aids`. Default: None, usage is not logged.
        sparse_values: Whether gradients of large value tables are sparse, as in `Tables`. Default: false.
        shard_values: Whether processes split the columns of these tables, as in `Tables`. Default: false.
        generic_share: Share of sequences that fetch the generic memory, as in `Blocks`. Default: 0.
        kwargs: Arguments of the Trainer.

    Raises:
        ValueError: If a part refuses its options.
    """

    def __init__(
        self,
        *args: Any,
        rates: Rates | None = None,
        balance_loss: float = 0.0,
        usage_steps: int | None = None,
        sparse_values: bool = False,
        shard_values: bool = False,
        generic_share: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.shards = Shards(self)
        self.blocks = Blocks(self, generic_share)
        self.tables = Tables(self, sparse_values, shard_values)
        self.rates = rates
        if rates is not None:
            # Trackers and DeepSpeed read the arguments, and must see the rates that are used.
            self.args.learning_rate, self.args.weight_decay = rates.learning_rate, rates.weight_decay
            self.args.lr_scheduler_type = SchedulerType(rates.scheduler_type)
            self.args.warmup_steps = rates.warmup_ratio
        self._rates_of_step = _RatesOfStep()
        self.add_callback(self._rates_of_step)
        self.aids = Aids(self, balance_loss, usage_steps)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does; changes that parts make to the model for training last only for this call."""
        with self.aids.training(), self.tables.training():
            return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, torch.Tensor | Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Take a training step as `Trainer.training_step` does, with the blocks that the texts fetch."""
        self.blocks.begin_pass(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Compute the loss as `Trainer.compute_loss` does, and in training add the balance loss times its coefficient."""
        compute = super().compute_loss
        return self.aids.with_balance(
            model,
            lambda: compute(model, inputs, return_outputs, num_items_in_batch),
            num_items_in_batch is not None,
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer as `Trainer.create_optimizer` does, on the groups of `parameter_groups`."""
        if self.optimizer is None:
            target: Any = self.model if model is None else model
            rates = self.rates or Rates(learning_rate=self.args.learning_rate, weight_decay=self.args.weight_decay)
            groups = parameter_groups(target, rates)
            class_and_options = self.optimizer_cls_and_kwargs
            optimizer_class, options = class_and_options or self.get_optimizer_cls_and_kwargs(self.args, target)
            if self.tables.sparse_values:
                optimizer_class = RowAdamW
            self.optimizer = optimizer_class(groups, **options)
            self.blocks.follow(self.optimizer)
        return super().create_optimizer(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the scheduler as `Trainer.create_scheduler` does, with one course per group."""
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
        """Log as `Trainer.log` does, with the rates of memories; `learning_rate` is the rate of the first group.

        If configured, the log also has `balance_loss`, the mean since the last event without its coefficient, and how
        memory slots were used.

        Raises:
            FloatingPointError: If the loss is not finite, since further steps would only waste time and spoil
                checkpoints.
        """
        logs |= self.aids.measures(logs)
        if "learning_rate" in logs:
            logs |= {f"learning_rate_{name}": rate for name, rate in self._rates_of_step.by_group.items()}
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `Trainer.save_model` does, gathered from what processes share; all processes call this.

        Raises:
            ValueError: If ZeRO-3 cut the model when it was loaded, and the model has not been trained.
        """
        with self.tables.whole():
            if not self.shards.save_model(output_dir, is_checkpoint=_internal_call):
                super().save_model(output_dir, _internal_call)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if not self.tables.clips_apart(model):
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        return self.tables.clip(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm as `Trainer._get_grad_norm` does, including the gradients of rows, columns and blocks.

        Raises:
            FloatingPointError: If the norm is not finite, since the step would spoil everything that trains.
        """
        if grad_norm is None and self.tables.clips_apart(model):
            grad_norm = self.tables.clip(model, float("inf"))
        norm: Any = super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]
        self.aids.check_norm(model, norm)
        return norm

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        with self.tables.whole(self.optimizer):
            super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        self.blocks.save_states(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with self.tables.loading():
            if not self.shards.load(resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            self.blocks.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        with self.tables.loading():
            super()._load_best_model()  # type: ignore[misc]
            assert self.state.best_model_checkpoint is not None
            self.blocks.load(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        self.tables.cut_moments()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn as the Trainer does, except about tied tensors that the checkpoint has under another name."""
        assert isinstance(self.model, nn.Module)
        missing = really_missing(self.model, load_result.missing_keys)
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))  # type: ignore[misc]


class MemoryTrainer(TrainsMemory, Trainer):
    """A `Trainer` whose memory keys keep a constant rate, and whose memory values keep it or follow a separate course.

    All else is as in `Trainer`. The arguments are the arguments of `TrainsMemory` and of `Trainer`.
    """


class _RatesOfStep(TrainerCallback):
    """Rates of the groups of memories in the last step, kept because the schedule has moved on when the step is logged."""

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
