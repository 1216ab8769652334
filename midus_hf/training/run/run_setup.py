"""Check the options of a run, cheapest checks first, and prepare the run."""

import contextlib
import copy
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.console import Console, RenderableType
from rich.table import Table
from safetensors import SafetensorError
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import deepspeed, is_deepspeed_zero3_enabled
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from midus_hf.banks.level_file import BankError
from midus_hf.config.wording import install_extra
from midus_hf.files.locks import Lock
from midus_hf.saved_models import refusing
from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.optim.parameter_groups import BLOCKS_GROUP, banks_that_train, parameter_groups
from midus_hf.training.optim.rates import VALUE_DECAY_RATIO, Rates
from midus_hf.training.optim.tensors import hold_for_training
from midus_hf.training.output.disk_room import check_room_of_run
from midus_hf.training.output.output_folder import check_output, made_for_nothing, start_output
from midus_hf.training.output.resumption import (
    Options,
    find_checkpoint,
    passes_of_a_step,
    settle_resumption,
    tell_passed_over,
)
from midus_hf.training.run.held_out import HeldOut, check_held_out
from midus_hf.training.run.loading import check_sequence_length, config_of_run, model_of_run, tokenizer_of_run
from midus_hf.training.run.run_trainer import InRun
from midus_hf.training.run.training_run import TrainingRun
from midus_hf.training.run_options import RunOptions
from midus_hf.training.trainer.tables import check_reads_few_rows

# A model with `requires_grad` set, wrapped by PEFT if it has adapters, and a description of what trains.
Chosen = tuple[Any, RenderableType]


@dataclasses.dataclass(frozen=True)
class CheckedRequest(Generic[Options]):
    """The parts of a run that its options name, loaded before any data is read.

    Args:
        requested: The options as the user gave them.
        config: The options that this start of the run uses, from `settle_resumption`.
        checkpoint: Checkpoint to resume from; None for a new run.
        passes: Forward passes of each process in a step.
    """

    requested: Options
    config: Options
    checkpoint: Path | None
    model_config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    passes: int


def check_request(requested: Options, length_key: str) -> CheckedRequest[Options]:
    """Check what can be checked before data and weights are read; return what the checks loaded.

    Args:
        length_key: Name of the option that sets the number of tokens per sequence.

    Raises:
        ValueError: If the options are wrong.
    """
    config = settle_resumption(requested)
    checkpoint = check_output(config)
    check_held_out(config)
    check_reporting(config.report_to)
    model_config = config_of_run(config, config.trainable if config.adapters is None else "all")
    if config.adapters is not None:
        if importlib.util.find_spec("peft") is None:
            raise ValueError(
                f"adapters need peft, which is not installed; {install_extra('train')}, or leave adapters out."
            )
        from midus_hf.training.run.adapters import check_adapters

        check_adapters(config.adapters, model_config)
    check_sequence_length(length_key, getattr(config, length_key), model_config)
    for name in ("balance_loss", "usage_steps"):
        if getattr(config, name) and not getattr(model_config, "memory", None):
            raise ValueError(
                f"{name} is {getattr(config, name)}, but this {model_config.model_type} model has no memory layers; train one "
                f"that has, or leave {name} out."
            )
    check_attention(config.attn_implementation, model_config)
    passes = passes_of_a_step(config, checkpoint)
    return CheckedRequest(requested, config, checkpoint, model_config, tokenizer_of_run(config), passes)


def training_arguments(
    config: RunOptions, arguments_class: type[TrainingArguments] = TrainingArguments, **changes: Any
) -> TrainingArguments:
    """Return the Trainer's arguments for a run, without rates and schedule, which a `MemoryTrainer` adds.

    Args:
        arguments_class: Class of the result, `TrainingArguments` or a subclass. Default: `TrainingArguments`.
    """
    known = {field.name for field in dataclasses.fields(arguments_class)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    options: dict[str, Any] = {
        "output_dir": config.output_dir,
        "max_steps": -1 if config.max_steps is None else config.max_steps,
        "num_train_epochs": 1.0 if config.num_train_epochs is None else config.num_train_epochs,
        "per_device_train_batch_size": config.per_device_train_batch_size,
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
    for name in ("optim", "save_steps"):
        if getattr(config, name) is not None:
            options[name] = getattr(config, name)
    return arguments_class(**options | changes)


def choose_what_trains(config: RunOptions, model: PreTrainedModel) -> Chosen:
    """Set what trains in the model, or put adapters on it; return the model and a description of what trains.

    Raises:
        ValueError: If the model lacks what is to train, or cannot have the adapters.
    """
    if config.adapters is None:
        return model, set_trainable(model, config.trainable, config.frozen)
    from midus_hf.training.run.adapters import add_adapters, describe_adapters

    adapted = add_adapters(model, config.adapters)
    return adapted, describe_adapters(adapted, config.adapters)


def make_run(
    request: CheckedRequest[Any],
    arguments: TrainingArguments,
    dataset: Dataset,
    *,
    data_lines: Sequence[str],
    held_out: Mapping[str, HeldOut],
    choose: Callable[[PreTrainedModel], Chosen],
    trainer_class: Callable[..., InRun],
    **trainer_options: Any,
) -> TrainingRun:
    """Load the model, make the Trainer, open the output, and print what trains; return the run, ready to start.

    Args:
        held_out: Held-out texts by name, from `prepare_held_out`.
        choose: Sets what trains in the model, and may put adapters on it, as `choose_what_trains` does.

    Raises:
        ValueError: If the options are wrong; nothing but cached tokens has been written then.
    """
    config = request.config
    if config.adapters is not None and is_deepspeed_zero3_enabled():
        raise ValueError(
            "adapters are merged into weights at the end, which DeepSpeed's ZeRO-3 cuts; expected processes that hold whole models. "
            "Start the run with configs/accelerate/ddp.yaml."
        )
    set_seed(config.seed)
    with loaded_whole():
        model, accompanying_files = model_of_run(config, request.model_config)
    use_cache = model.config.use_cache
    for option in ("sparse_values", "shard_values"):
        if getattr(config, option):
            check_reads_few_rows(model, option)
    model, report = choose(model)
    dtypes = hold_for_training(model, config.bf16)
    room = check_room_of_run(config, model, dtypes, arguments, dataset, request.checkpoint)
    with made_for_nothing(Path(config.output_dir)) if arguments.process_index == 0 else contextlib.nullcontext():
        trainer = trainer_class(
            model=model,
            args=arguments,
            train_dataset=dataset,
            config=config,
            tokenizer=request.tokenizer,
            held_out=held_out,
            **trainer_options,
        )
        checkpoint = None if request.checkpoint is None else _finite_checkpoint(config, trainer)
        # This comes last: it removes a run that is to be overwritten, and making the Trainer may still raise an error.
        lock = _open_output(request)
    if PartialState().is_main_process:
        lines = [*data_lines]
        if checkpoint is not None:
            lines.append(f"going on from {checkpoint}")
        if request.passes != config.gradient_accumulation_steps:
            lines.append(
                f"gradient_accumulation_steps is {request.passes} in place of {config.gradient_accumulation_steps}, for as many "
                "sequences per step as before"
            )
        print_start(config, report, model, lines)
    return TrainingRun(
        config, checkpoint, model, request.tokenizer, trainer, dtypes, use_cache, accompanying_files, room, lock
    )


def _finite_checkpoint(config: RunOptions, trainer: InRun) -> Path:
    """Return the checkpoint to resume from: the latest that is whole and in which everything that trains is finite.

    Raises:
        ValueError: If there is none, or the run cannot go on from it.
    """
    not_finite: dict[Path, str] = {}
    while True:
        checkpoint, _ = find_checkpoint(config, not_finite)
        try:
            finding = trainer.checkpoints.first_not_finite_in(checkpoint)
        except (BankError, SafetensorError) as error:  # the file was damaged before its manifest was written
            finding = str(error)
        if finding is None:
            break
        not_finite[checkpoint] = finding
    tell_passed_over(not_finite)
    trainer.shards.check_checkpoint(checkpoint)
    return checkpoint


def _open_output(request: CheckedRequest[Any]) -> Lock | None:
    """Open the output in the main process, once no process reads files there; raise an error in all processes.

    Returns:
        The lock on the output, in the main process.
    """
    state = PartialState()
    state.wait_for_everyone()
    lock: Lock | None = None
    refusal: list[str | None] = [None]
    if state.is_main_process:
        try:
            lock = start_output(request.config, request.requested, request.checkpoint)
        except ValueError as error:
            refusal = [str(error)]
    broadcast_object_list(refusal)
    if refusal[0] is not None:
        raise ValueError(refusal[0])
    return lock


# Errors that transformers raises for models that cannot be made.
_ERRORS = (OSError, ValueError, ImportError)


def check_attention(attn_implementation: str | None, model_config: PreTrainedConfig) -> None:
    """Check that a model can be made with an implementation of attention, without memory for the model's weights.

    A model that cannot be made at all passes this check: loading it will give the reason.

    Args:
        attn_implementation: Implementation of attention, as in `from_pretrained`; None leaves the choice to
            transformers.

    Raises:
        ValueError: If the implementation is not installed, is unknown, or does not suit the model.
    """
    if attn_implementation is None:
        return
    try:
        _make(model_config, None)
    except _ERRORS:
        return
    message = (
        f"attn_implementation is {attn_implementation!r}; expected one that is installed and that a {model_config.model_type} "
        "model has, such as sdpa or eager"
    )
    with refusing(message, *_ERRORS):
        _make(model_config, attn_implementation)


def _make(model_config: PreTrainedConfig, attn_implementation: str | None) -> None:
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(
            copy.deepcopy(model_config), attn_implementation=attn_implementation, trust_remote_code=False
        )


@contextlib.contextmanager
def loaded_whole() -> Iterator[None]:
    """Load or make models whole in each process inside the context; DeepSpeed cuts them for training.

    Otherwise, once `TrainingArguments` exist, transformers lets ZeRO-3 cut parameters while a model is loaded. Checks
    before training would then read the dtypes and sizes of empty tensors.
    """
    config_before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config_before


def check_reporting(report_to: str | list[str]) -> None:
    """Check that every tracker of `RunOptions.report_to` is known and installed, or raise `ValueError`."""
    names = [report_to] if isinstance(report_to, str) else report_to
    if names == ["none"]:
        return
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ValueError(f"report_to is {report_to!r}; expected none, or one or more of {known}.")
        if name not in get_available_reporting_integrations():
            raise ValueError(
                f"report_to is {name!r}, which is not installed; pip install {name}, or set report_to: none."
            )


def print_start(rates: Rates, report: RenderableType, model: PreTrainedModel, lines: Sequence[str]) -> None:
    """Print what trains, the parameter groups, and sentences about the data and the resumption."""
    console = Console()
    console.print(report)
    groups = Table("group", "tensors", "parameters", "maximum rate", "course", "decay")
    courses = {
        "schedule": rates.lr_scheduler_type,
        "constant": "constant",
        "4x-to-1x": f"{rates.lr_scheduler_type}, 4x to 1x in {rates.value_decay_ratio or VALUE_DECAY_RATIO:.0%}",
    }
    for group in parameter_groups(model, rates):
        tensors, parameters = str(len(group["params"])), sum(parameter.numel() for parameter in group["params"])
        if group["name"] == BLOCKS_GROUP:
            layouts = [layout for banks in banks_that_train(model) for layout in banks.layouts.values()]
            tensors, parameters = "as fetched", sum(layout.bank for layout in layouts)
        groups.add_row(
            group["name"].replace("_", " "),
            tensors,
            f"{parameters:,}",
            f"{group['lr']:g}",
            courses[group["course"]],
            f"{group['weight_decay']:g}",
        )
    console.print(groups)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
