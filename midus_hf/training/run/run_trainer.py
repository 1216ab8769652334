"""The Trainer of a run: its progress table, held-out texts, checkpoints and costs."""

import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback

from midus_hf.files.checkpoint_files import RUN_LOG
from midus_hf.training.optim.rates import Rates
from midus_hf.training.optim.tensors import whole_numel
from midus_hf.training.output.resumption import StepSize
from midus_hf.training.run.callbacks import Interruption, ProgressTable, TrainingClock, TrainingLog
from midus_hf.training.run.checkpoints import Checkpoints
from midus_hf.training.run.held_out import HeldOut, HeldOutTexts
from midus_hf.training.run_options import RunOptions
from midus_hf.training.trainer.memory_trainer import TrainsMemory


class InRun(TrainsMemory):
    """Mixin for a Trainer that prints a table, measures held-out text, and continues if a checkpoint cannot be written.

    The Trainer leaves this to parts: `checkpoints` and `held_out`, and the callbacks `interruption`, `clock` and
    `progress`. The Trainer itself does not get the tokenizer, since it would also rewrite the special tokens in the
    model's config.

    Args:
        config: Options of the run, with its rates.
        held_out: Texts to measure by name, as in `HeldOutTexts`.
        kwargs: Arguments of `TrainsMemory` that do not follow from `config`, and of the Trainer; its
            `args.save_total_limit` must be None.
    """

    def __init__(
        self,
        *args: Any,
        config: RunOptions,
        tokenizer: PreTrainedTokenizerBase,
        held_out: Mapping[str, HeldOut],
        **kwargs: Any,
    ):
        assert isinstance(config, Rates), "a run's options have its rates"
        super().__init__(
            *args,
            rates=config,
            balance_loss=config.balance_loss,
            usage_steps=config.usage_steps,
            sparse_values=config.sparse_values,
            shard_values=config.shard_values,
            **kwargs,
        )
        assert self.args.save_total_limit is None, (
            "checkpoints are removed here, once all processes have written theirs"
        )
        self.held_out = HeldOutTexts(self, held_out, config)
        self.checkpoints = Checkpoints(self, tokenizer, config.save_total_limit)
        self.interruption = Interruption(self.largest)
        self.clock = TrainingClock(config.max_seconds, self.largest, bool(held_out))
        self.progress = ProgressTable(list(held_out), self.clock)
        for unwanted in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            self.remove_callback(unwanted)
        # The log logs at every checkpoint, so it comes after the callbacks that request checkpoints. Held-out texts are logged
        # when training begins, so they come after the log and the table, which begin there.
        self.callback_handler.callbacks[:0] = [self.clock, self.interruption, StepSize(self.args)]
        for callback in (TrainingLog(Path(config.output_dir, RUN_LOG)), self.progress, self.held_out):
            self.add_callback(callback)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as `Trainer.log` does; with a loss, add the seconds of training, and whether `max_seconds` has ended it.

        The last event of a run also has its costs: `trained_parameters` and `peak_memory_bytes`.
        """
        if "train_loss" in logs:
            logs |= self._costs()
        if "loss" in logs:
            logs["training_seconds"] = self.clock.seconds
            if self.clock.has_ended_training:
                logs["ended_by_max_seconds"] = True
        super().log(logs, start_time)

    def log_costs(self) -> None:
        """Log the costs of a resumed run that has no step left, since the earlier process may have died before it logged them."""
        self.log(self._costs())

    def _costs(self) -> dict[str, float]:
        assert isinstance(self.model, nn.Module)
        # A sharded parameter counts whole.
        parameters = sum(whole_numel(parameter) for parameter in self.model.parameters() if parameter.requires_grad)
        return {
            "trained_parameters": parameters,
            "peak_memory_bytes": peak_memory_bytes(),
            "training_seconds": self.clock.seconds,
        }

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the held-out texts as `midus eval` does, and log `eval_loss` (nats per token) and `perplexity`.

        For a text with a name, the entries are `eval_NAME_loss` and `eval_NAME_perplexity`. For a model that has blocks
        to fetch, `eval_with_blocks` or `eval_NAME_with_blocks` says whether documents fetched the blocks of their
        paths. If a dataset is given, or the run has no held-out text, evaluate as `Trainer.evaluate` does.
        """
        if eval_dataset is not None or not self.held_out.texts:
            return super().evaluate(eval_dataset, *args, **kwargs)
        return self.held_out.evaluate()

    def largest(self, number: int) -> int:
        """Return the largest of the numbers with which the processes call this method."""
        if self.args.world_size == 1:
            return int(number)
        numbers = self.accelerator.gather(torch.tensor([int(number)], device=self.args.device))
        return int(numbers.max())

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        save = super()._save_checkpoint
        self.checkpoints.save(folder, lambda: save(model, trial))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        save = super()._save
        folder = Path(output_dir or str(self.args.output_dir))
        self.checkpoints.save_weights(folder, state_dict, lambda weights: save(output_dir, weights))

    def _save_rng_state(self, output_dir: str) -> None:
        save: Any = super()._save_rng_state  # type: ignore[misc]
        self.checkpoints.save_last_part(lambda: save(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.checkpoints.know(Path(resume_from_checkpoint))


class RunTrainer(InRun, Trainer):
    """The Trainer of a run of continual pretraining."""


def peak_memory_bytes() -> int:
    """Return this process's peak memory so far: allocated by PyTorch on the GPU, or resident without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
