"""Checkpoints of a run: whole or absent, with finite numbers only; failing to write one does not end the run."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from midus_hf.files.checkpoint_files import BLOCK_STATES
from midus_hf.files.run_files import remove_written
from midus_hf.models.fetching import Banks
from midus_hf.models.host import MemoryModel
from midus_hf.training.optim.finite import error_of, first_not_finite, first_not_finite_in, trained_tensors
from midus_hf.training.optim.freezing import has_adapters
from midus_hf.training.output.frozen_weights import FrozenWeights
from midus_hf.training.output.run_checkpoints import (
    begin_checkpoint,
    finish_checkpoint,
    last_checkpoint,
    linked_entries,
    remove_old_checkpoints,
)
from midus_hf.training.output.saving import say, write_failure

_OF_ANOTHER_PROCESS = "another process could not write its part"


class Checkpoints:
    """Handling of checkpoints by the Trainer of a run, beyond what a `Trainer` does.

    A checkpoint becomes whole with its manifest, which is written when all processes have written their parts and these
    are on the disk. Only then older checkpoints are removed. If a file cannot be written, the unfinished checkpoint is
    removed, and training goes on. Frozen weights that an earlier checkpoint has too are linked.

    Args:
        trainer: A Trainer that has its model. Every process has its own `Checkpoints`, and all processes call the same
            methods.
        tokenizer: Tokenizer that is saved beside every checkpoint.
        keep: Number of latest checkpoints to keep; None keeps all.
        best_step: Returns the step whose checkpoint is kept beside the latest, or None.
    """

    def __init__(
        self,
        trainer: Any,
        tokenizer: PreTrainedTokenizerBase,
        keep: int | None,
        best_step: Callable[[], int | None],
    ):
        self._trainer, self._tokenizer, self._keep, self._best_step = trainer, tokenizer, keep, best_step
        # Why the last checkpoint could not be written; None if it was.
        self.failure: str | None = None
        self._parts_failed = False
        self._frozen_weights = FrozenWeights(copies=1 if keep == 1 else 2)
        self._is_writing = False

    def save(self, folder: Path, write_parts: Callable[[], None]) -> None:
        """Save a checkpoint; all processes call this.

        Args:
            folder: Folder of the checkpoint.
            write_parts: Writes the files that a Trainer writes there.

        Raises:
            FloatingPointError: If a trained tensor or block is not finite; nothing is written then.
        """
        self.check_finite()
        step, is_main = self._trainer.state.global_step, self._trainer.args.should_save
        self.failure, self._parts_failed = None, False
        files_of_user: list[Path] = []
        earlier = self._frozen_weights.earlier(folder)

        def begin() -> None:
            files_of_user.extend(begin_checkpoint(folder))
            self._tokenizer.save_pretrained(folder)

        def write() -> None:
            self._is_writing = True
            try:
                with contextlib.ExitStack() as linking:
                    for banks in _open_banks(self._trainer.model):
                        linking.enter_context(banks.linking(earlier, self._frozen_weights.copies))
                    write_parts()
            finally:
                self._is_writing = False

        def finish() -> None:
            finish_checkpoint(folder, files_of_user, linked_entries(folder, earlier[-2:]))
            self._frozen_weights.know(folder)

        failed = any(
            self._fails(part) for part in (begin if is_main else _nothing, write, finish if is_main else _nothing)
        )
        if not is_main:
            return
        if failed:
            remove_written(folder.parent, folder)
            latest = last_checkpoint(folder.parent)
            say(
                f"checkpoint-{step} was not saved in {folder.parent}: {self.failure}. "
                f"{f'The latest there is {latest.name}' if latest else 'There is none yet'}."
            )
        else:
            remove_old_checkpoints(folder.parent, step, self._keep, self._best_step())

    def save_weights(
        self, folder: Path, state_dict: dict[str, Any] | None, save: Callable[[dict[str, Any] | None], None]
    ) -> None:
        """Save a model into a folder; in a checkpoint, link frozen weights that an earlier checkpoint has too.

        Args:
            folder: Folder for the model.
            state_dict: The weights to save; None for the weights of the model.
            save: Saves the model with the weights in its argument.
        """
        trainer = self._trainer
        are_whole = state_dict is None and trainer.tables.columns is None and not has_adapters(trainer.model)
        if self._is_writing and trainer.args.should_save and are_whole:
            self._frozen_weights.save(folder, trainer.model, save)
        else:
            save(state_dict)

    def save_last_part(self, write: Callable[[], None]) -> None:
        """Write the last part of a checkpoint; return when all processes have written theirs.

        Args:
            write: Writes the part of this process.

        Raises:
            OSError: If a process could not write its part, now or earlier.
        """
        failure = _failure_of(write)
        self._parts_failed = bool(self._trainer.largest(failure is not None))
        if self._parts_failed:
            raise OSError(failure or _OF_ANOTHER_PROCESS)

    def save_in(self, folder: Path) -> None:
        """Save a checkpoint of the current step as `checkpoint-N` in a folder, which need not be the folder of the run.

        Raises:
            OSError: If the checkpoint cannot be written.
        """
        arguments = self._trainer.args
        run_folder, arguments.output_dir = arguments.output_dir, str(folder)
        try:
            self._trainer._save_checkpoint(self._trainer.model)
        finally:
            arguments.output_dir = run_folder
        if self.failure is not None:
            raise OSError(self.failure)

    def load(self, checkpoint: Path) -> None:
        """Load the weights in the folder of a checkpoint into the model."""
        self._trainer._load_from_checkpoint(str(checkpoint))

    def know(self, checkpoint: Path) -> None:
        """Remember the folder of a whole checkpoint whose weights were loaded into the model."""
        self._frozen_weights.know(checkpoint)

    def check_finite(self) -> None:
        """End the run if a trained tensor or block is not finite, before it is saved; all processes call this.

        Raises:
            FloatingPointError: If a tensor or block is not finite in any process.
        """
        trainer = self._trainer
        block_findings = (bank.first_not_finite() for bank in trainer.blocks.banks)
        finding = first_not_finite(trained_tensors(trainer.model)) or next(filter(None, block_findings), None)
        if trainer.largest(finding is not None):
            raise error_of(finding or "what another process trains is not finite", trainer.state.global_step)

    def first_not_finite_in(self, checkpoint: Path) -> str | None:
        """Return "NAME holds nan" for the first trained tensor or block in a checkpoint that is not finite, or None.

        Args:
            checkpoint: Folder of the checkpoint, which is whole.
        """
        parameters = self._trainer.model.named_parameters()
        finding = first_not_finite_in(
            checkpoint, (name for name, parameter in parameters if not parameter.requires_grad)
        )
        banks = enumerate(self._trainer.blocks.banks)
        block_findings = (bank.first_not_finite_in(checkpoint / BLOCK_STATES / str(number)) for number, bank in banks)
        return finding or next(filter(None, block_findings), None)

    def _fails(self, part: Callable[[], None]) -> bool:
        """Do a part of saving; return whether any process failed, and set `failure`. All processes call this."""
        failure = _failure_of(part)
        # All processes must call `largest` equally often: one that failed before `save_last_part` calls it here, others there.
        failed = self._parts_failed or bool(self._trainer.largest(failure is not None))
        if failed:
            self.failure = failure or _OF_ANOTHER_PROCESS
        return failed


def _failure_of(write: Callable[[], None]) -> str | None:
    """Write something; return why a file could not be written, or None if it was."""
    try:
        write()
    except Exception as error:
        failure = write_failure(error)
        if failure is None:
            raise
        return failure
    return None


def _open_banks(model: torch.nn.Module) -> list[Banks]:
    """Return the open banks of a model, wrapped by PEFT or not."""
    modules = (module for module in model.modules() if isinstance(module, MemoryModel))
    return [module.own_banks for module in modules if module.own_banks.are_open]


def _nothing() -> None:
    """Do nothing, in a process that waits while the main process writes."""
