"""One run of pretraining, from its options to the trained model."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from accelerate import PartialState
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
    default_data_collator,
    set_seed,
)

from midus_hf.training.disk_room import RoomNeeded, check_room_of_run
from midus_hf.training.freezing import TrainableReport, set_trainable
from midus_hf.training.held_out import held_out_losses, is_stopped_early, prepare_held_out
from midus_hf.training.interruption import RunInterrupted
from midus_hf.training.loading import check_sequence_length, load_model
from midus_hf.training.mixture import Mixture
from midus_hf.training.model_card import add_training
from midus_hf.training.options import TrainConfig
from midus_hf.training.origin import config_of_run, model_of_run, tokenizer_of_run
from midus_hf.training.output_folder import (
    as_yaml,
    check_output,
    last_checkpoint,
    publish,
    start_output,
)
from midus_hf.training.precision import hold_for_training, restore_dtypes
from midus_hf.training.progress import without_library_bars
from midus_hf.training.reporting import check_reporting
from midus_hf.training.run_trainer import RunTrainer
from midus_hf.training.saving import SaveError, save_where_possible, say
from midus_hf.training.start_summary import print_start
from midus_hf.training.trainer_arguments import training_arguments
from midus_hf.training.training_data import build_dataset, open_corpora
from midus_hf.training.training_log import TrainingLog
from midus_hf.training.written_files import CONFIG_NAME, LOG_NAME, PARTIAL_NAME, STATE_NAME, remove_written


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run did.

    Args:
        output: Folder of the trained model: that of the run, unless it could not be saved there.
        steps: Optimizer steps, those before a resumption included.
        tokens: Tokens that all processes trained on, likewise.
        loss: Mean loss of the last log event; None if there was none.
        seconds: Wall time of the training loop, without what came before a resumption.
        tokens_per_second: Tokens of all processes per second of these; None if the loop took no step.
        best_step: The step whose model was saved, chosen by held-out text; None if that is simply the last one.
    """

    output: str
    steps: int
    tokens: int
    loss: float | None
    seconds: float
    tokens_per_second: float | None
    best_step: int | None = None


@dataclasses.dataclass
class TrainingRun:
    """A run that is ready to start: everything a request can get wrong has been checked."""

    config: TrainConfig
    checkpoint: Path | None
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    trainer: RunTrainer
    report: TrainableReport
    dtypes: dict[str, torch.dtype]
    use_cache: bool
    accompanying_files: dict[str, bytes]
    room: RoomNeeded

    def execute(self) -> TrainResult:
        """Train, save the model, and say what was done.

        Raises:
            RunInterrupted: If a signal ended training early; a checkpoint has been saved then.
            SaveError: If the trained model could not be saved anywhere.
        """
        with self.trainer.interruption as interruption, without_library_bars():
            try:
                result = self._train()
            finally:
                self.trainer.progress.close()
            if interruption.signal_number:
                self._stop(interruption.signal_number)
            if self.config.keep_best:
                result = dataclasses.replace(result, best_step=self.trainer.load_best())
            place = self._save(result)
            return result if place == Path(self.config.output) else dataclasses.replace(result, output=str(place))

    def _train(self) -> TrainResult:
        trainer, before = self.trainer, TrainerState()
        if self.checkpoint is not None:
            before = TrainerState.load_from_json(str(self.checkpoint / STATE_NAME))
        ended = is_stopped_early(held_out_losses(before.log_history), self.config.early_stop)
        if self.checkpoint is not None and (ended or before.global_step >= before.max_steps):
            # A Trainer that resumes at the last step takes another one.
            self.model.load_state_dict(load_model(str(self.checkpoint)).state_dict())
            trainer.state, seconds = before, 0.0
        else:
            output = trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
            seconds = output.metrics["train_runtime"]
        tokens, tokens_before = trainer.state.num_input_tokens_seen, before.num_input_tokens_seen
        losses = [event["loss"] for event in trainer.state.log_history if "loss" in event]
        return TrainResult(
            output=self.config.output,
            steps=trainer.state.global_step,
            tokens=tokens,
            loss=losses[-1] if losses else None,
            seconds=seconds,
            tokens_per_second=(tokens - tokens_before) / seconds if tokens > tokens_before else None,
        )

    def _stop(self, signal_number: int) -> NoReturn:
        """End an interrupted run, whose checkpoint is in the output unless that failed."""
        step, output = self.trainer.state.global_step, Path(self.config.output)
        place = output
        if self.trainer.save_failure is not None:
            try:
                place = self._save_where_possible(self._save_interrupted, self.room.checkpoint)
            except SaveError as error:
                latest = last_checkpoint(output)
                raise RunInterrupted(
                    f"interrupted after step {step:,}, without a checkpoint ({error}); "
                    f"{f'resume=true goes on from {latest.name}' if latest else 'there is no earlier one'}",
                    signal_number,
                ) from error
        saved = place / f"checkpoint-{step}"
        hint = "resume=true" if place == output else f"resume={saved}"
        raise RunInterrupted(f"interrupted after step {step:,}; {hint} goes on from {saved}", signal_number)

    def _save_interrupted(self, folder: Path) -> None:
        self.trainer.save_checkpoint_in(folder)
        if self.trainer.is_world_process_zero():
            (folder / CONFIG_NAME).write_text(as_yaml(self.config), encoding="utf-8")

    def _save(self, result: TrainResult) -> Path:
        """Save model and tokenizer, in the dtypes and with the cache setting and the files that the model came with."""
        output = Path(self.config.output)
        restore_dtypes(self.model, self.dtypes)
        self.model.config.use_cache = self.use_cache
        try:
            place = self._save_where_possible(partial(self._save_in, result), self.room.model)
        except SaveError as error:
            latest = last_checkpoint(output)
            rest = f"resume=true goes on from {latest.name}" if latest else "no checkpoint was saved"
            raise SaveError(f"the trained model could not be saved ({error}); {rest}") from error
        if place != output:
            say(
                f"The trained model is in {place}, not in {output}. Move it there once there is room: "
                f"cp -a {place}/. {output}/ && rm -r {place}"
            )
        return place

    def _save_in(self, result: TrainResult, folder: Path) -> None:
        partial_model = folder / PARTIAL_NAME
        try:
            self.trainer.save_model(str(partial_model))
            if self.trainer.is_world_process_zero():
                (partial_model / "training_args.bin").unlink(missing_ok=True)
                self.tokenizer.save_pretrained(partial_model)
                files = dict(self.accompanying_files)
                if "README.md" in files:
                    files["README.md"] = add_training(
                        files["README.md"],
                        self.config,
                        result.steps,
                        result.tokens,
                        result.loss,
                        result.best_step,
                    )
                publish(partial_model, folder, files)
        finally:
            if self.trainer.is_world_process_zero():
                remove_written(folder, partial_model)

    def _save_where_possible(self, write: Callable[[Path], None], num_bytes: int) -> Path:
        on_failure = self.config.output_on_failure
        return save_where_possible(
            write,
            Path(self.config.output),
            None if on_failure is None else Path(on_failure),
            num_bytes,
            self.trainer.interruption.lifted,
        )


def train(config: TrainConfig) -> TrainResult:
    """Pretrain a model, from its weights or from the beginning.

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
    check_reporting(config.report_to)
    model_config = config_of_run(config)
    check_sequence_length(config.sequence_length, model_config)
    _check_has_memory(config, model_config)
    tokenizer = tokenizer_of_run(config)
    corpora = open_corpora(config, tokenizer, model_config.vocab_size)
    arguments = training_arguments(config)
    dataset = build_dataset(config, corpora, arguments.world_size)
    if isinstance(dataset, Mixture):
        arguments.max_steps, arguments.train_sampling_strategy = dataset.steps, "sequential"
    held_out = prepare_held_out(config, tokenizer, model_config)
    set_seed(config.seed)
    model, accompanying_files = model_of_run(config, model_config)
    use_cache = model.config.use_cache
    report = set_trainable(model, config.trainable, config.frozen)
    dtypes = hold_for_training(model, config.precision)
    room = check_room_of_run(config, model, dtypes, arguments, dataset, checkpoint)
    PartialState().wait_for_everyone()
    if PartialState().is_main_process:
        start_output(config)
        print_start(config, report, dataset, model)
    PartialState().wait_for_everyone()
    trainer = RunTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        data_collator=default_data_collator,
        callbacks=[TrainingLog(Path(config.output, LOG_NAME))],
        tokenizer=tokenizer,
        keep_checkpoints=config.keep_checkpoints,
        held_out=held_out,
        eval_every=config.eval_every,
        keep_best=config.keep_best,
        early_stop=config.early_stop,
        rates=config,
        balance_loss=config.balance_loss,
        usage_every=config.usage_every,
    )
    return TrainingRun(
        config, checkpoint, model, tokenizer, trainer, report, dtypes, use_cache, accompanying_files, room
    )


def _check_has_memory(config: TrainConfig, model_config: PreTrainedConfig) -> None:
    for name, is_set in (("balance_loss", config.balance_loss), ("usage_every", config.usage_every)):
        if is_set and not getattr(model_config, "memory", None):
            raise ValueError(
                f"{name} is {is_set}, but this {model_config.model_type} model has no memory layers; train one that has, "
                f"or leave {name} out."
            )
