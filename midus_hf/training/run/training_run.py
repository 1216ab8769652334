"""A run that is ready to start, and its course up to the trained model."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from midus_hf.files.checkpoint_files import PARTIAL_MODEL, TRAINER_STATE
from midus_hf.files.locks import Lock
from midus_hf.files.run_files import remove_written
from midus_hf.library_bars import without_library_bars
from midus_hf.training.optim.freezing import has_adapters
from midus_hf.training.optim.tensors import restore_dtypes
from midus_hf.training.output.disk_room import RoomNeeded, SaveError, save_where_possible, say
from midus_hf.training.output.output_folder import add_training, publish, write_options
from midus_hf.training.output.run_checkpoints import last_checkpoint
from midus_hf.training.run.callbacks import RunInterrupted
from midus_hf.training.run.held_out import held_out_losses, is_stopped_early
from midus_hf.training.run.run_trainer import InRun
from midus_hf.training.run_options import RunOptions


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    Args:
        output: Folder of the trained model: the folder of the run, unless the model could not be saved there.
        steps: Number of optimizer steps, including steps before a resumption.
        tokens: Number of tokens that all processes trained on, including tokens before a resumption.
        loss: Mean loss of the last log event; None if there was none.
        seconds: Wall time of the training loop in seconds, without the time before a resumption.
        tokens_per_second: Tokens of all processes per second in this time; None if the loop took no step.
        best_step: Step whose model was saved, chosen by held-out text. Default: None, the last step.
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
    """A run that is ready to start: all checks of its options have passed.

    The main process holds a lock on the output until the run has ended.
    """

    config: RunOptions
    checkpoint: Path | None
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    trainer: InRun
    dtypes: dict[str, torch.dtype]
    use_cache: bool
    accompanying_files: dict[str, bytes]
    room: RoomNeeded
    lock: Lock | None

    def execute(self) -> TrainResult:
        """Train, save the model, and return the result.

        Raises:
            FloatingPointError: If the loss, a gradient or a trained tensor stops being finite; what is not finite is
                not saved.
            RunInterrupted: If a signal ended training early, after a checkpoint was saved if possible.
            SaveError: If the trained model could not be saved anywhere.
        """
        try:
            with self.trainer.interruption as interruption, without_library_bars():
                try:
                    result = self._train()
                finally:
                    self.trainer.progress.close()
                if interruption.signal_number:
                    self._stop(interruption.signal_number)
                if self.config.load_best_model_at_end:
                    result = dataclasses.replace(result, best_step=self.trainer.held_out.load_best())
                saved_to = self._save(result)
                if saved_to != Path(self.config.output_dir):
                    result = dataclasses.replace(result, output=str(saved_to))
                return result
        finally:
            if self.lock is not None:
                self.lock.release()

    def _train(self) -> TrainResult:
        trainer, state_before = self.trainer, TrainerState()
        if self.checkpoint is not None:
            state_before = TrainerState.load_from_json(str(self.checkpoint / TRAINER_STATE))
        trainer.clock.resume(state_before)
        losses_before = held_out_losses(state_before.log_history, self.config.eval_texts)
        ended = trainer.clock.is_over or is_stopped_early(losses_before, self.config.early_stopping_patience)
        if self.checkpoint is not None and (ended or state_before.global_step >= state_before.max_steps):
            # A Trainer that resumes at the last step would take another step.
            trainer.checkpoints.load(self.checkpoint)
            trainer.state, seconds = state_before, 0.0
            if trainer.held_out.texts and state_before.global_step not in trainer.held_out.losses():
                trainer.evaluate()  # resuming with less patience or fewer seconds has ended the run here
            trainer.log_costs()
        else:
            output = trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
            seconds = output.metrics["train_runtime"]
        tokens, tokens_before = trainer.state.num_input_tokens_seen, state_before.num_input_tokens_seen
        losses = [event["loss"] for event in trainer.state.log_history if "loss" in event]
        return TrainResult(
            output=self.config.output_dir,
            steps=trainer.state.global_step,
            tokens=tokens,
            loss=losses[-1] if losses else None,
            seconds=seconds,
            tokens_per_second=(tokens - tokens_before) / seconds if tokens > tokens_before else None,
        )

    def _stop(self, signal_number: int) -> NoReturn:
        """End an interrupted run, whose checkpoint is in the output unless writing it failed."""
        step, output = self.trainer.state.global_step, Path(self.config.output_dir)
        saved_to, lifted = output, self.trainer.interruption.lifted
        if self.trainer.checkpoints.failure is not None:
            try:
                saved_to = save_where_possible(self._save_interrupted, self.config, self.room.checkpoint, lifted)
            except SaveError as error:
                latest = last_checkpoint(output)
                raise RunInterrupted(
                    f"interrupted after step {step:,}, without a checkpoint ({error}); "
                    f"{f'resume_from_checkpoint=true goes on from {latest.name}' if latest else 'there is no earlier one'}",
                    signal_number,
                ) from error
        saved = saved_to / f"checkpoint-{step}"
        hint = "resume_from_checkpoint=true" if saved_to == output else f"resume_from_checkpoint={saved}"
        raise RunInterrupted(f"interrupted after step {step:,}; {hint} goes on from {saved}", signal_number)

    def _save_interrupted(self, folder: Path) -> None:
        self.trainer.checkpoints.save_in(folder)
        if self.trainer.is_world_process_zero():
            write_options(folder, self.config)

    def _save(self, result: TrainResult) -> Path:
        """Save model and tokenizer, with the original dtypes, cache setting and further files; return the folder."""
        output, lifted = Path(self.config.output_dir), self.trainer.interruption.lifted
        if self.trainer.shards.shares_parameters:
            self.trainer.shards.saved_dtypes = self.dtypes
        else:
            restore_dtypes(self.model, self.dtypes)
        self.trainer.checkpoints.check_finite()
        adapted: Any = self.trainer.model
        if has_adapters(adapted):
            from midus_hf.training.run.adapters import merge_adapters

            self.trainer.model = merge_adapters(adapted)
        self.model.config.use_cache = self.use_cache
        try:
            saved_to = save_where_possible(partial(self._save_in, result), self.config, self.room.model, lifted)
        except SaveError as error:
            latest = last_checkpoint(output)
            hint = f"resume_from_checkpoint=true goes on from {latest.name}" if latest else "no checkpoint was saved"
            raise SaveError(f"the trained model could not be saved ({error}); {hint}") from error
        if saved_to != output:
            say(
                f"The trained model is in {saved_to}, not in {output}. Move it there once there is room: "
                f"cp -a {saved_to}/. {output}/ && rm -r {saved_to}"
            )
        return saved_to

    def _save_in(self, result: TrainResult, folder: Path) -> None:
        partial_model = folder / PARTIAL_MODEL
        try:
            self.trainer.save_model(str(partial_model))
            if self.trainer.is_world_process_zero():
                (partial_model / "training_args.bin").unlink(missing_ok=True)
                self.tokenizer.save_pretrained(partial_model)
                files = dict(self.accompanying_files)
                if "README.md" in files:
                    card = files["README.md"]
                    files["README.md"] = add_training(
                        card, self.config, result.steps, result.tokens, result.loss, result.best_step
                    )
                publish(partial_model, folder, files)
        finally:
            if self.trainer.is_world_process_zero():
                remove_written(folder, partial_model)
