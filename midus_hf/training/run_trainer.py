"""The Trainer of a run: it goes on when a checkpoint cannot be written, and removes old ones itself."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, ProgressCallback
from transformers.trainer_callback import PrinterCallback

from midus_hf.training.interruption import Interruption
from midus_hf.training.output_folder import last_checkpoint, remove_old_checkpoints
from midus_hf.training.saving import say, write_failure
from midus_hf.training.trainer import MemoryTrainer
from midus_hf.training.written_files import STATE_NAME, remove_written


class RunTrainer(MemoryTrainer):
    """A `MemoryTrainer` whose checkpoints hold the tokenizer, and may fail to be written.

    A Trainer that is given the tokenizer saves it too, but also rewrites the special tokens in the model's config.

    Args:
        tokenizer: Saved beside every checkpoint.
        keep_checkpoints: Latest checkpoints to keep; None keeps all.
        kwargs: What a `MemoryTrainer` takes. `save_total_limit` is not for this class.
    """

    def __init__(
        self, *args: Any, tokenizer: PreTrainedTokenizerBase, keep_checkpoints: int | None = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        assert self.args.save_total_limit is None, (
            "checkpoints are removed here, once all processes have written theirs"
        )
        self.tokenizer = tokenizer
        self.keep_checkpoints = keep_checkpoints
        self.save_failure: str | None = None
        """Why the last checkpoint could not be written; None if it was."""
        self.interruption = Interruption(self._largest)
        # Before the log, which has an event wherever there is a checkpoint.
        self.callback_handler.callbacks.insert(0, self.interruption)
        for talkative in (ProgressCallback, PrinterCallback):
            self.remove_callback(talkative)

    def save_checkpoint_in(self, folder: Path) -> None:
        """Save a checkpoint of the current step as `checkpoint-N` in a folder, which need not be that of the run.

        Raises:
            OSError: If it cannot be written.
        """
        assert isinstance(self.model, nn.Module)
        home, self.args.output_dir = self.args.output_dir, str(folder)
        try:
            self._save_checkpoint(self.model)
        finally:
            self.args.output_dir = home
        if self.save_failure is not None:
            raise OSError(self.save_failure)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """As `Trainer._save_checkpoint`; where a file cannot be written, what there is of the checkpoint is removed."""
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial), f"checkpoint-{step}")
        failure = None
        try:
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / STATE_NAME).unlink(missing_ok=True)  # written last: with it a checkpoint is whole
                self.tokenizer.save_pretrained(folder)
            super()._save_checkpoint(model, trial)
        except Exception as error:
            failure = write_failure(error)
            if failure is None:
                raise
        failed = self._largest(failure is not None)
        self.save_failure = (failure or "another process could not write its part") if failed else None
        if not self.args.should_save:
            return
        if failed:
            remove_written(folder.parent, folder)
            latest = last_checkpoint(folder.parent)
            say(
                f"checkpoint-{step} was not saved in {folder.parent}: {self.save_failure}. "
                f"{f'The latest there is {latest.name}' if latest else 'There is none yet'}."
            )
        else:
            remove_old_checkpoints(folder.parent, step, self.keep_checkpoints)

    def _largest(self, number: int) -> int:
        """The largest of the numbers of all processes."""
        if self.args.world_size == 1:
            return int(number)
        numbers = self.accelerator.gather(torch.tensor([int(number)], device=self.args.device))
        return int(numbers.max())
