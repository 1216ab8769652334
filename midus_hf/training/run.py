"""One run of continual pretraining, from its options to the trained model."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from midus_hf.training.freezing import TrainableReport, set_trainable
from midus_hf.training.loading import (
    check_sequence_length,
    load_accompanying_files,
    load_config,
    load_model,
    load_tokenizer,
)
from midus_hf.training.mixture import Mixture
from midus_hf.training.model_card import add_training
from midus_hf.training.options import TrainConfig
from midus_hf.training.output_folder import LOG_NAME, PARTIAL_NAME, SavesTokenizer, check_output, publish, start_output
from midus_hf.training.parameter_groups import parameter_groups
from midus_hf.training.precision import hold_for_training, restore_dtypes
from midus_hf.training.trainer import MemoryTrainer
from midus_hf.training.training_data import TrainingData, build_dataset, describe_corpus, open_corpora
from midus_hf.training.training_log import TrainingLog


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run did.

    Args:
        output: Folder of the trained model.
        steps: Optimizer steps, those before a resumption included.
        tokens: Tokens that all processes trained on, likewise.
        loss: Mean loss of the last log event; None if there was none.
        seconds: Wall time of the training loop, without what came before a resumption.
        tokens_per_second: Tokens of all processes in these seconds, a second; None if the loop took no step.
    """

    output: str
    steps: int
    tokens: int
    loss: float | None
    seconds: float
    tokens_per_second: float | None


@dataclasses.dataclass
class TrainingRun:
    """A run that is ready to start: everything a request can get wrong has been checked."""

    config: TrainConfig
    checkpoint: Path | None
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    trainer: MemoryTrainer
    report: TrainableReport
    dtypes: dict[str, torch.dtype]
    use_cache: bool
    accompanying_files: dict[str, bytes]

    def execute(self) -> TrainResult:
        """Train, save the model, and say what was done."""
        trainer, before = self.trainer, TrainerState()
        if self.checkpoint is not None:
            before = TrainerState.load_from_json(str(self.checkpoint / "trainer_state.json"))
        if self.checkpoint is not None and before.global_step >= before.max_steps:
            # A Trainer that resumes at the last step takes another one.
            self.model.load_state_dict(load_model(str(self.checkpoint)).state_dict())
            trainer.state, seconds = before, 0.0
        else:
            output = trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
            seconds = output.metrics["train_runtime"]
        tokens, tokens_before = trainer.state.num_input_tokens_seen, before.num_input_tokens_seen
        losses = [event["loss"] for event in trainer.state.log_history if "loss" in event]
        result = TrainResult(
            output=self.config.output,
            steps=trainer.state.global_step,
            tokens=tokens,
            loss=losses[-1] if losses else None,
            seconds=seconds,
            tokens_per_second=(tokens - tokens_before) / seconds if tokens > tokens_before else None,
        )
        self._save(result)
        return result

    def _save(self, result: TrainResult) -> None:
        """Save model and tokenizer, in the dtypes and with the cache setting and the files that the model came with."""
        trainer, folder = self.trainer, Path(self.config.output)
        restore_dtypes(self.model, self.dtypes)
        self.model.config.use_cache = self.use_cache
        trainer.save_model(str(folder / PARTIAL_NAME))
        if trainer.is_world_process_zero():
            (folder / PARTIAL_NAME / "training_args.bin").unlink(missing_ok=True)
            self.tokenizer.save_pretrained(folder / PARTIAL_NAME)
            files = dict(self.accompanying_files)
            if "README.md" in files:
                files["README.md"] = add_training(
                    files["README.md"], self.config, result.steps, result.tokens, result.loss
                )
            publish(folder / PARTIAL_NAME, folder, files)


def train(config: TrainConfig) -> TrainResult:
    """Continue the pretraining of a model.

    Prints which layers train, and writes to `config.output`: the trained model and its tokenizer, checkpoints,
    `log.jsonl` and the options (`train_config.yaml`).

    Args:
        config: The options of the run.

    Raises:
        ValueError: If the request is wrong; nothing but cached tokens has been written then.
        FloatingPointError: If the loss stops being finite.
    """
    return prepare(config).execute()


def prepare(config: TrainConfig) -> TrainingRun:
    """Check a request, cheapest checks first, load what it names, and open its output.

    Args:
        config: The options of the run.

    Raises:
        ValueError: If the request is wrong; nothing but cached tokens has been written then.
    """
    checkpoint = check_output(config)
    _check_reporting(config)
    model_config = load_config(config.model, config.trainable)
    check_sequence_length(config.sequence_length, model_config)
    _check_has_memory(config, model_config)
    tokenizer = load_tokenizer(config.model)
    corpora = open_corpora(config, tokenizer, model_config.vocab_size)
    arguments = training_arguments(config)
    dataset = build_dataset(config, corpora, arguments.world_size)
    if isinstance(dataset, Mixture):
        arguments.max_steps, arguments.train_sampling_strategy = dataset.steps, "sequential"
    set_seed(config.seed)
    model = load_model(config.model, config.attn_implementation)
    accompanying_files = load_accompanying_files(config.model)
    use_cache = model.config.use_cache
    report = set_trainable(model, config.trainable)
    dtypes = hold_for_training(model, config.precision)
    if PartialState().is_main_process:
        start_output(config)
        _show(config, report, dataset, model)
    PartialState().wait_for_everyone()
    trainer = MemoryTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        data_collator=default_data_collator,
        callbacks=[TrainingLog(Path(config.output, LOG_NAME)), SavesTokenizer(tokenizer)],
        key_value_learning_rate=config.key_value_learning_rate,
        value_learning_rate=config.value_learning_rate,
        value_schedule=config.value_schedule,
        value_transforms=config.value_transforms,
        balance_loss=config.balance_loss,
        usage_every=config.usage_every,
    )
    return TrainingRun(config, checkpoint, model, tokenizer, trainer, report, dtypes, use_cache, accompanying_files)


def training_arguments(config: TrainConfig) -> TrainingArguments:
    """The Trainer's own arguments for a run.

    Args:
        config: The options of the run.
    """
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    optional: dict[str, Any] = {}
    if config.activation_checkpointing:
        optional |= {checkpointing: True, f"{checkpointing}_kwargs": {"use_reentrant": False}}
    if config.save_every is not None:
        optional["save_steps"] = config.save_every
    return TrainingArguments(
        output_dir=config.output,
        max_steps=-1 if config.max_steps is None else config.max_steps,
        num_train_epochs=1.0 if config.epochs is None else config.epochs,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        lr_scheduler_type=config.schedule,
        warmup_steps=config.warmup_ratio,
        max_grad_norm=config.max_grad_norm,
        bf16=config.precision == "bf16",
        use_cpu=not torch.accelerator.is_available(),
        save_strategy="no" if config.save_every is None else "steps",
        save_total_limit=config.keep_checkpoints,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        include_num_input_tokens_seen="all",
        report_to=config.report_to,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.accelerator.is_available(),
        seed=config.seed,
        **optional,
    )


def _check_reporting(config: TrainConfig) -> None:
    if config.report_to != "none" and importlib.util.find_spec(config.report_to) is None:
        raise ValueError(
            f"report_to is {config.report_to!r}, which is not installed; pip install {config.report_to}, "
            "or set report_to: none."
        )


def _check_has_memory(config: TrainConfig, model_config: PreTrainedConfig) -> None:
    for name, is_set in (("balance_loss", config.balance_loss), ("usage_every", config.usage_every)):
        if is_set and not getattr(model_config, "memory", None):
            raise ValueError(
                f"{name} is {is_set}, but this {model_config.model_type} model has no memory layers; train one that has, "
                f"or leave {name} out."
            )


def _show(config: TrainConfig, report: TrainableReport, dataset: TrainingData, model: PreTrainedModel) -> None:
    console = Console()
    console.print(report)
    groups = Table("group", "tensors", "parameters", "maximum rate", "course", "decay")
    courses = {"schedule": config.schedule, "constant": "constant", "4x-to-1x": f"{config.schedule}, 4x to 1x"}
    for group in parameter_groups(
        model,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        key_value_learning_rate=config.key_value_learning_rate,
        value_learning_rate=config.value_learning_rate,
        value_schedule=config.value_schedule,
        value_transforms=config.value_transforms,
    ):
        groups.add_row(
            group["name"].replace("_", " "),
            str(len(group["params"])),
            f"{sum(parameter.numel() for parameter in group['params']):,}",
            f"{group['lr']:g}",
            courses[group["course"]],
            f"{group['weight_decay']:g}",
        )
    console.print(groups)
    for line in describe_corpus(config, dataset):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
