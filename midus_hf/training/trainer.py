"""Transformers' Trainer for memories: groups, rates, checkpoints, finite numbers, FSDP and DeepSpeed."""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState
from transformers.trainer_utils import TrainOutput, rotate_checkpoints
from transformers.utils import CONFIG_NAME

from midus_hf.config.errors import RequestError, print_note
from midus_hf.data.packing import IGNORED_LABEL
from midus_hf.data.stream import StreamedSequences
from midus_hf.evaluation.text_rows import row_sums
from midus_hf.files.checkpoint_files import INPUTS_FILE, MANIFEST_FILE, STREAM_FILE, TRAINED_FILE, TRAINER_STATE
from midus_hf.files.outputs import convert_disk_errors
from midus_hf.memories.hierarchical.fetching import Banks
from midus_hf.memories.hierarchical.training import BlockTrainer
from midus_hf.models.view import has_adapters
from midus_hf.training.arguments import MemoryArguments
from midus_hf.training.base_divergence import base_logits, check_base_divergence, divergence_without_target
from midus_hf.training.checkpoints import (
    Digests,
    checkpoints_in,
    digest_sequences,
    finish_checkpoint,
    has_optimizer_state,
    load_checkpoint,
    remove_checkpoint,
    resumed_checkpoint,
    save_trained,
    saved_tensors,
)
from midus_hf.training.keys import Rates
from midus_hf.training.optim import group_schedules, parameter_groups
from midus_hf.training.row_adamw import RowAdamW, check_sparse_values, clip_rows, row_gradients

if TYPE_CHECKING:  # mixins call the methods of the Trainer that they are mixed into
    AnyTrainer = Trainer
else:
    AnyTrainer = object


class NotFiniteError(FloatingPointError):
    """Error of a run that reached numbers which are not finite, and ends without saving them."""

    def __init__(self, quantity: str, step: int):
        super().__init__(
            f"{quantity} at step {step}; expected a finite number. Lower the learning rates, and resume from a checkpoint before "
            "that step. '--debug underflow_overflow' names the first module that computes it."
        )


def first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return "NAME holds nan" for the first named tensor with a number that is not finite, or None."""
    named = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not named or math.isfinite(nn.utils.get_total_norm([tensor for _, tensor in named], math.inf)):
        return None
    largest = ((name, tensor.abs().max().item()) for name, tensor in named)  # NaN if any number is NaN
    return next((f"{name} holds {value}" for name, value in largest if not math.isfinite(value)), None)


def mean_over_tokens(measured: Any) -> dict[str, float]:
    """Return the loss per token and the perplexity of rows, from their summed losses and token counts."""
    loss = (np.hstack(measured.predictions).sum() / np.hstack(measured.label_ids).sum()).item()
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}


class MemoryTrainerMixin(AnyTrainer):
    """Mixin for any kind of `Trainer`: memory keys and values keep a constant rate, or values a schedule.

    Put it before the class that it extends, as in `class MemorySFTTrainer(MemoryTrainerMixin, SFTTrainer)`. The keys of
    `MemoryArguments` are read from `args` if it has them. A checkpoint has trained parameters, the optimizer and changed blocks of
    banks, and ends with a manifest; `load_checkpoint` loads one into a model.

    Args:
        saved_dtypes: Dtypes, by name, in which processes that share parameters save tensors. Default: as they are.
        digests: Digests of what the run read, which checkpoints record with those of the sequences. Default: none are recorded.
    """

    def __init__(
        self,
        *args: Any,
        saved_dtypes: dict[str, torch.dtype] | None = None,
        digests: Digests | None = None,
        **kwargs: Any,
    ):
        self._digests = digests
        super().__init__(*args, **kwargs)
        options = self.args if isinstance(self.args, MemoryArguments) else None
        self.saved_dtypes = saved_dtypes or {}
        self.base_kl: float = getattr(self.args, "base_kl", 0.0)
        if self.base_kl:
            check_base_divergence(self)
        # Per batch of this process since the last log event, in nats per token.
        self._divergences: list[torch.Tensor] = []
        prepare_sharing(self)
        model: Any = self.model
        self.blocks: BlockTrainer | None = None  # None for a model without banks
        if isinstance(getattr(model, "banks", None), Banks):
            self.blocks = BlockTrainer(self, 0.0 if options is None else options.generic_share)
        self.sparse_values = options is not None and options.sparse_values
        if self.sparse_values:
            check_sparse_values(self)
        if self.label_smoother is not None or self.compute_loss_func is not None:
            config = getattr(model, "config", None)
            has_chapters = any(entry.get("type") == "moc" for entry in getattr(config, "memory", None) or [])
            if has_chapters or getattr(config, "output_router_logits", False):
                key = "label_smoothing_factor" if self.label_smoother is not None else "compute_loss_func"
                reason = "with which the Trainer computes the loss itself and leaves out the losses of routers"
                raise RequestError(f"{key} is set, {reason}; expected a model without them. Leave it out.")
        dataset: Any = self.train_dataset
        self._stream: StreamedSequences | None = dataset if isinstance(dataset, StreamedSequences) else None
        if self._stream is not None:
            self.args.ignore_data_skip = True  # the stream resumes itself
        self._is_checkpointing = False

    @cached_property
    def digests(self) -> Digests:
        """Digests that checkpoints record: those that were given, and of the sequences; empty if none were given."""
        return {**self._digests, **digest_sequences(self)} if self._digests else {}

    @property
    def shares_parameters(self) -> bool:
        """Whether each process holds only shards, by FSDP, or by ZeRO-3 once it has the model."""
        if self.is_deepspeed_enabled:
            return _is_zero_3(self) and getattr(self, "deepspeed", None) is not None
        return self.is_fsdp_enabled

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does; true resumes from the latest complete checkpoint, not damaged ones.

        At the end, the model that the run ends with is loaded. A `Path` has been checked; an incomplete checkpoint, or one of
        processes that share parameters in another way, is a `RequestError`. Infinite numbers or NaN raise a `FloatingPointError`.
        """
        checkpoint = resume_from_checkpoint or None
        if checkpoint is not None and not isinstance(checkpoint, Path):
            checkpoint = resumed_checkpoint(str(self.args.output_dir), checkpoint)
            if checkpoint is not None:
                check_checkpoint(self, checkpoint)
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
            if 0 < state.max_steps <= state.global_step and self.args.max_steps in (-1, state.max_steps):
                best = state.best_model_checkpoint if self.args.load_best_model_at_end else None
                if best is not None:  # next to it, also if the folder was moved
                    checkpoint = checkpoint.with_name(Path(best).name)
                self._load_from_checkpoint(str(checkpoint))
                self.state = state
                return TrainOutput(state.global_step, 0.0, {"train_runtime": 0.0})
        if checkpoint is not None and self._stream is not None:
            self._stream.load(checkpoint / STREAM_FILE.format(self.args.process_index))
        assert isinstance(self.model, nn.Module)
        with row_gradients(self.model) if self.sparse_values else contextlib.nullcontext():
            return super().train(None if checkpoint is None else str(checkpoint), *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        """Return the Trainer's batches; those of a stream without Accelerate, which reads ahead."""
        if self._stream is None:
            return super().get_train_dataloader()
        generator = torch.Generator()  # without one, a loader draws from the state that a resumed run has loaded
        size: Any = self._train_batch_size
        return DataLoader(self._stream, size, collate_fn=self.data_collator, generator=generator)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does; a language model per token of all rows, with a perplexity."""
        given = self.compute_metrics
        drops = self.args.dataloader_drop_last
        hosting: Any = self.model
        is_plain = given is None and self.compute_loss_func is None and not self.args.batch_eval_metrics
        if is_plain and hosting.get_output_embeddings() is not None:
            self.compute_metrics = mean_over_tokens
        self.args.dataloader_drop_last = False
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self.compute_metrics = given
            self.args.dataloader_drop_last = drops

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Predict a batch as `Trainer` does; for `mean_over_tokens`, the losses of its rows."""
        by_tokens = self.compute_metrics is mean_over_tokens
        if not by_tokens or "labels" not in inputs:  # without which a trainer has a loss of its own
            return super().prediction_step(model, inputs, prediction_loss_only or by_tokens, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        targets = inputs.pop("labels")[:, 1:]
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs).logits[:, :-1]
        return None, row_sums(logits, targets), (targets != IGNORED_LABEL).sum(1)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take a training step as `Trainer.training_step` does, with the blocks that the texts fetch."""
        if self.blocks is not None:
            self.blocks.begin_pass(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the Trainer's loss; in training plus `base_kl` times the divergence from the base."""
        if not self.base_kl or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        base = base_logits(self.accelerator.unwrap_model(model, keep_torch_compile=False), inputs)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        divergence = divergence_without_target(outputs.logits, base, labels)
        tokens = (labels[:, 1:] != IGNORED_LABEL).sum().clamp(min=1)
        self._divergences.append(divergence.detach() / tokens)
        # Per token, of all batches and processes whose gradients are summed, or of this one.
        is_summed = num_items_in_batch is not None and (self.model_accepts_loss_kwargs or self.compute_loss_func)
        divergence = divergence / (num_items_in_batch if is_summed else tokens)
        if is_summed and self.args.average_tokens_across_devices:
            divergence = divergence * (self.accelerator.num_processes if self.args.n_gpu <= 1 else self.args.n_gpu)
        loss = loss + self.base_kl * divergence
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as `Trainer.log` does; with a training loss also `base_divergence`, in nats per token."""
        if self._divergences and "loss" in logs:
            mean = torch.stack(self._divergences).mean()
            logs["base_divergence"] = self.accelerator.gather(mean[None]).mean().item()
            self._divergences.clear()
        super().log(logs, *args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer as `Trainer.create_optimizer` does, on the groups of `parameter_groups`."""
        if self.optimizer is None:
            target: Any = self.model if model is None else model
            args: Any = self.args
            rates = args if isinstance(args, Rates) else Rates(args.learning_rate, weight_decay=args.weight_decay)
            given = self.optimizer_cls_and_kwargs
            optimizer_class, options = given or self.get_optimizer_cls_and_kwargs(self.args, target)
            if self.sparse_values:
                optimizer_class = RowAdamW
                options = {key: options[key] for key in options if key != "fused"}
            self.optimizer = optimizer_class(parameter_groups(target, rates), **options)
            if self.blocks is not None:
                self.blocks.follow(self.optimizer)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create the scheduler as `Trainer.create_scheduler` does, with one schedule per group."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            assert optimizer is not None
            keys = ("lr_scheduler_type", "warmup_steps", "lr_scheduler_kwargs")
            options: dict[str, Any] = {key: getattr(self.args, key) for key in keys}
            self.lr_scheduler = group_schedules(optimizer, num_training_steps, **options)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def largest(self, number: int) -> int:
        if self.args.world_size == 1:
            return int(number)
        return int(self.accelerator.gather(torch.tensor([int(number)], device=self.args.device)).max())

    def check_finite(self) -> None:
        """Refuse trained tensors or blocks not finite in any process; all processes call this."""
        assert isinstance(self.model, nn.Module)
        tensors: list[tuple[str, Any]] = []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                shard = getattr(parameter, "ds_tensor", parameter).detach()  # the shard of this process
                tensors.append((name, shard.to_local() if hasattr(shard, "to_local") else shard))
        for bank in [] if self.blocks is None else self.blocks.banks:
            tensors += bank.named_values()
        finding = first_not_finite(tensors)
        if self.largest(finding is not None):
            raise NotFiniteError(finding or "what another process trains is not finite", self.state.global_step)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model gathered from its shards, if what was trained is finite; all processes call this."""
        self.check_finite()
        self.write_model(output_dir, _internal_call)

    def write_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `save_model` does, without a check for finite numbers."""
        if self._is_checkpointing and not has_adapters(self.model):
            assert isinstance(self.model, nn.Module) and output_dir is not None
            if self.is_fsdp_enabled:  # which writes shards of the model and of the optimizer
                return
            gathered = self.accelerator.get_state_dict(self.deepspeed) if self.shares_parameters else None
            if self.args.should_save:
                save_trained(self.model, Path(output_dir), gathered)
        elif not _internal_call and self.shares_parameters:
            save_gathered(self, output_dir)
        elif self.is_deepspeed_enabled and getattr(self, "deepspeed", None) is None:
            # No step was taken since the model was loaded, so DeepSpeed has not wrapped it: each process holds it whole.
            if self.args.should_save:
                self._save(output_dir)
        else:
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Save as `Trainer` does, with blocks, stream and inputs; remove a checkpoint that is incomplete."""
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        limit = self.args.save_total_limit
        self.args.save_total_limit = None
        self._is_checkpointing = True
        with convert_disk_errors(folder, self._bytes_of_checkpoint()):
            try:
                if self.args.should_save:
                    remove_checkpoint(folder)
                    # The Trainer looks for it before processes write the sharded model to it.
                    folder.mkdir(parents=True)
                self.accelerator.wait_for_everyone()
                super()._save_checkpoint(model, trial)
                if self.args.should_save and self.blocks is not None:
                    self.blocks.save(folder)
                if self._stream is not None:
                    self._stream.save(folder / STREAM_FILE.format(self.args.process_index))
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    if self.digests:
                        (folder / INPUTS_FILE).write_text(json.dumps(self.digests, indent=1) + "\n", encoding="utf-8")
                    finish_checkpoint(folder)
                    for step, path in checkpoints_in(folder.parent).items():
                        if limit is not None and step > self.state.global_step:
                            remove_checkpoint(path)
                    best = self.state.best_model_checkpoint
                    rotate_checkpoints(str(folder.parent), save_total_limit=limit, best_model_checkpoint=best)
            except Exception:
                if self.args.should_save and not (folder / MANIFEST_FILE).is_file():
                    remove_checkpoint(folder)
                raise
            finally:
                self._is_checkpointing = False
                self.args.save_total_limit = limit

    def _bytes_of_checkpoint(self) -> int:
        assert isinstance(self.model, nn.Module)
        states = {} if self.args.save_only_model or self.optimizer is None else self.optimizer.state
        tensors = [tensor for _, tensor in saved_tensors(self.model)]
        tensors += [each for state in states.values() for each in state.values() if isinstance(each, torch.Tensor)]
        banks = [] if self.blocks is None else self.blocks.banks
        records = (bank.layout.record_numel(level) for bank in banks for level, _ in bank.touched())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + 3 * 4 * sum(records)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if Path(resume_from_checkpoint, TRAINED_FILE).is_file():
            target: Any = self.model if model is None else model
            load_checkpoint(target, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.blocks is not None:
            self.blocks.load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_best_model()  # type: ignore[misc]
        else:
            self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.sparse_values or self.blocks is not None:
            return self.clip_gradients(model.parameters(), self.args.max_grad_norm)
        return self._refuse_infinite(super()._clip_grad_norm(model))  # type: ignore[misc]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and (self.sparse_values or self.blocks is not None):
            grad_norm = self.clip_gradients(model.parameters(), math.inf)
        return self._refuse_infinite(super()._get_grad_norm(model, grad_norm))  # type: ignore[misc]

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Any:
        """Clip blocks with parameters, and rows of tables separately; return the norm; refuse infinite ones."""
        dense: list[Any] = list(parameters)
        tables = []
        if self.sparse_values:
            tables = [each for each in dense if each.grad is not None and each.grad.is_sparse]
        if tables:
            dense = [each for each in dense if each.grad is not None and not each.grad.is_sparse]
        if self.blocks is not None:
            dense += self.blocks.leaves()
        norm: Any = self.accelerator.clip_grad_norm_(dense, max_norm)
        if tables:
            norm = torch.stack([norm, clip_rows(tables, max_norm).to(norm.device)]).norm()
        return self._refuse_infinite(norm)

    def _refuse_infinite(self, norm: Any) -> Any:
        """Return the norm of a step's gradients; raise `NotFiniteError` if it or the loss is not finite."""
        # _tr_loss is summed over the steps since the last log event.
        step = self.state.global_step + 1
        loss = self._tr_loss.item()
        if not math.isfinite(loss):
            raise NotFiniteError(f"loss is {loss}{self._broken_tensor()}", step)
        if norm is not None and not math.isfinite(norm) and self.accelerator.scaler is None:
            if dtype_of_deepspeed(self) != "float16":  # with which a gradient scaler skips the step
                raise NotFiniteError(f"gradient norm is {float(norm)}", step)
        return norm

    def _broken_tensor(self) -> str:
        if self.shares_parameters:
            return ""
        model: Any = self.model
        found = first_not_finite([*model.named_parameters(), *model.named_buffers()])
        return "" if found is None else f", and {found},"


class MemoryTrainer(MemoryTrainerMixin, Trainer):
    """A `Trainer` with `MemoryTrainerMixin`."""


def prepare_sharing(trainer: Any) -> None:
    """Prepare FSDP or DeepSpeed for a model; refuse setups that would not shard, or round frozen weights.

    FSDP2 gets the layer classes of the model unless the user named them; it computes in lower precision, but reduces gradients and
    returns losses in float32.
    """
    for name, enabled in (("FSDP", trainer.is_fsdp_enabled), ("DeepSpeed", trainer.is_deepspeed_enabled)):
        if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() == "true" and not enabled:
            raise RequestError(
                f"accelerate was started with {name}, which does not shard on {trainer.args.device.type}: all processes would "
                "hold whole models. Start it with configs/accelerate/ddp.yaml, or on accelerators."
            )
    if getattr(trainer.args, "protect", None) and (trainer.is_fsdp_enabled or _is_zero_3(trainer)):
        raise RequestError(
            "protect compares whole models, and the processes share parameters; expected processes that hold whole models. "
            "Start the run with configs/accelerate/ddp.yaml."
        )
    if trainer.is_fsdp_enabled and trainer.args.save_only_model:
        raise RequestError(
            "save_only_model is true, and processes that share parameters by FSDP save them with the optimizer's; expected whole "
            "checkpoints. Leave save_only_model out, or save_steps."
        )
    if trainer.is_deepspeed_enabled:
        settings = _deepspeed_settings(trainer)
        for section in ("optimizer", "scheduler"):
            if section in settings:
                raise RequestError(
                    f"the file of DeepSpeed has a section {section!r}, which would replace the run's groups and rates; "
                    "expected none. Remove it from the file."
                )
        dtype = dtype_of_deepspeed(trainer)
        for name, parameter in trainer.model.named_parameters():
            if dtype is not None and not parameter.requires_grad and parameter.dtype is torch.float32:
                reason = "bf16 is set" if trainer.args.bf16 else f"the file of DeepSpeed sets {dtype}"
                raise RequestError(
                    f"{reason}, and DeepSpeed casts a whole model to {dtype}: {name}, which is frozen in float32, would be "
                    f"rounded; expected fp32, or a model in {dtype}. Start it with configs/accelerate/fsdp2.yaml."
                )
        if _is_zero_3(trainer):
            # Despite the option's name, DeepSpeed gathers weights in the dtype that they have.
            settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        _prepare_fsdp(plugin, trainer.model)


def _prepare_fsdp(plugin: Any, model: Any) -> None:
    if plugin.fsdp_version != 2:
        raise RequestError(
            f"fsdp_version is {plugin.fsdp_version}, which flattens parameters, so that matrices and norms cannot be distinguished; "
            "expected 2, as in configs/accelerate/fsdp2.yaml."
        )
    if plugin.transformer_cls_names_to_wrap is None:
        # The model's class also names the family's layers, which a model lacks if all its layers host memories.
        names = {type(module).__name__ for module in model.modules()}
        plugin.transformer_cls_names_to_wrap = sorted(names & set(model._no_split_modules or ()))
    policy = plugin.mixed_precision_policy
    full = torch.float32
    if policy is not None and policy.param_dtype is not None:
        plugin.mixed_precision_policy = dataclasses.replace(policy, reduce_dtype=full, output_dtype=full)


def _deepspeed_settings(trainer: Any) -> dict[str, Any]:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return {} if plugin is None else plugin.deepspeed_config


def _is_zero_3(trainer: Any) -> bool:
    return trainer.is_deepspeed_enabled and _deepspeed_settings(trainer).get("zero_optimization", {}).get("stage") == 3


def dtype_of_deepspeed(trainer: Any) -> str | None:
    """Return the dtype that DeepSpeed casts the model to, by the run's bf16 or DeepSpeed's file, or None."""
    if trainer.args.bf16:
        return "bfloat16"
    dtypes = {"bf16": "bfloat16", "fp16": "float16"}
    settings = _deepspeed_settings(trainer)
    return next((dtype for key, dtype in dtypes.items() if settings.get(key, {}).get("enabled") is True), None)


def check_checkpoint(trainer: Any, checkpoint: Path) -> None:
    """Refuse a checkpoint without optimizer or of other sharding, which a Trainer would accept silently."""
    if not has_optimizer_state(checkpoint):
        raise RequestError(
            f"{checkpoint} has no optimizer and no schedule, as save_only_model saves it; expected a complete checkpoint. Start the "
            "run again without save_only_model, or load trained parameters by midus_hf.training.load_checkpoint."
        )
    ways = (
        ("share parameters by FSDP", "pytorch_model_fsdp*", trainer.is_fsdp_enabled),
        ("share parameters by DeepSpeed", "global_step*/zero_pp_rank_*_model_states.pt", _is_zero_3(trainer)),
        ("share moments by DeepSpeed", "global_step*", trainer.is_deepspeed_enabled),
        ("hold whole models", "", True),
    )
    saved_sharing = next(way for way, files, _ in ways if not files or any(checkpoint.glob(files)))
    sharing = next(way for way, _, is_current in ways if is_current)
    if saved_sharing != sharing:
        raise RequestError(
            f"{checkpoint} was saved by processes that {saved_sharing}, and these {sharing}; resume it so, or start a new run."
        )
    processes = trainer.args.world_size
    names = ["rng_state.pth"] if processes == 1 else [f"rng_state_{index}.pth" for index in range(processes)]
    if trainer.args.process_index == 0 and not all((checkpoint / name).is_file() for name in names):
        print_note(f"{checkpoint} has the random numbers of another number of processes: those of dropout start over")


def save_gathered(trainer: Any, output_dir: str | None) -> None:
    """Save a sharded model in `trainer.saved_dtypes`, and upload it if asked; all processes call this."""
    # DeepSpeed returns the model in the first process, and nothing in the others.
    model: Any = trainer.model
    wrapped = model if trainer.is_fsdp_enabled else trainer.deepspeed
    state: dict[str, torch.Tensor] | None = trainer.accelerator.get_state_dict(wrapped)
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = every - {name for name, _ in model.named_parameters()}  # a cast would turn these into separate tensors
    whole = ((name, tensor) for name, tensor in (state or {}).items() if name not in tied)
    saved = {name: tensor.to(trainer.saved_dtypes.get(name, tensor.dtype)) for name, tensor in whole}
    trainer._save(output_dir, saved)
    first = next((name for name, tensor in model.named_parameters() if tensor.is_floating_point()), None)
    if trainer.args.should_save and first in saved:
        config = Path(output_dir or str(trainer.args.output_dir)) / CONFIG_NAME
        settings = json.loads(config.read_text(encoding="utf-8"))
        settings["dtype"] = str(saved[first].dtype).removeprefix("torch.")  # Transformers wrote that of training
        config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if trainer.args.push_to_hub:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)
