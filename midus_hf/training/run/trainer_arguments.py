"""Options of a run as arguments of the Trainer."""

import dataclasses
from typing import Any

import torch
from transformers import TrainingArguments

from midus_hf.training.run_options import RunOptions


def training_arguments(
    config: RunOptions, arguments_class: type[TrainingArguments] = TrainingArguments, **changes: Any
) -> TrainingArguments:
    """Return the Trainer's arguments for a run, without rates and schedule, which a `MemoryTrainer` adds.

    Args:
        config: Options of the run that the arguments stand for.
        arguments_class: Class of the result, `TrainingArguments` or a subclass. Default: `TrainingArguments`.
        changes: Arguments that are added or replaced.
    """
    known = {field.name for field in dataclasses.fields(arguments_class)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    options: dict[str, Any] = {
        "output_dir": config.output_dir,
        "max_steps": -1 if config.max_steps is None else config.max_steps,
        "num_train_epochs": 1.0 if config.num_train_epochs is None else config.num_train_epochs,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "adam_beta2": config.adam_beta2,
        "max_grad_norm": config.max_grad_norm,
        "bf16": config.bf16,
        "use_cpu": not torch.accelerator.is_available(),
        "save_strategy": "no" if config.save_steps is None else "steps",
        "logging_steps": config.logging_steps,
        "logging_nan_inf_filter": False,
        "include_num_input_tokens_seen": "all",
        "report_to": config.report_to,
        "remove_unused_columns": False,
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "seed": config.seed,
        checkpointing: config.activation_checkpointing,
    }
    if config.activation_checkpointing:
        options[f"{checkpointing}_kwargs"] = {"use_reentrant": False}
    if config.optim is not None:
        options["optim"] = config.optim
    if config.save_steps is not None:
        options["save_steps"] = config.save_steps
    return arguments_class(**options | changes)
