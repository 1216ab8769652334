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

from midus_hf.training.data.held_out import HeldOut, HeldOutEvents
from midus_hf.training.optim.cut_parameters import whole_numel
from midus_hf.training.optim.freezing import has_adapters
from midus_hf.training.output.resumption import StepSize
from midus_hf.training.run.checkpoints import Checkpoints
from midus_hf.training.run.held_out_texts import HeldOutTexts
from midus_hf.training.run.interruption import Interruption
from midus_hf.training.run.progress import ProgressTable
from midus_hf.training.run.training_clock import TrainingClock
from midus_hf.training.trainer.memory_trainer import TrainsMemory


class InRun(TrainsMemory):
    """Mixin for a Trainer that prints a table, measures held-out text, and continues if a checkpoint cannot be written.

    The Trainer leaves this to parts: `checkpoints` and `held_out`, and the callbacks `interruption`, `clock` and
    `progress`. The Trainer itself does not get the tokenizer, since it would also rewrite the special tokens in the
    model's config.

    Args:
        tokenizer: Tokenizer that is saved beside every checkpoint.
        save_total_limit: Number of latest checkpoints to keep, `keep` of `Checkpoints`. Default: None, all.
        held_out: Texts to measure by name, as in `HeldOutTexts`. Default: None, no texts.
        eval_steps: Steps between evaluations, as in `RunOptions`. Default: None, only at the start and at the end.
        load_best_model_at_end: Whether to save the best steps, as in `HeldOutTexts`. Default: false.
        early_stopping_patience: Evaluations without improvement, as in `HeldOutTexts`. Default: None, never stop early.
        max_seconds: Seconds of training, as in `RunOptions`. Default: None, no limit.
        kwargs: Arguments of the Trainer; its `args.save_total_limit` must be None.
    """

    def __init__(
        self,
        *args: Any,
        tokenizer: PreTrainedTokenizerBase,
        save_total_limit: int | None = None,
        held_out: Mapping[str, HeldOut] | None = None,
        eval_steps: int | None = None,
        load_best_model_at_end: bool = False,
        early_stopping_patience: int | None = None,
        max_seconds: float | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        assert self.args.save_total_limit is None, (
            "checkpoints are removed here, once all processes have written theirs"
        )
        self.held_out = HeldOutTexts(self, held_out or {}, load_best_model_at_end, early_stopping_patience)
        self.checkpoints = Checkpoints(self, tokenizer, save_total_limit, self.held_out.step_to_keep)
        self.interruption = Interruption(self.largest)
        self.clock = TrainingClock(max_seconds, self.largest, bool(held_out))
        # These callbacks come before the log callback, which logs at every checkpoint: it must see which ones they request.
        self.callback_handler.callbacks[:0] = [self.clock, self.interruption, StepSize(self.args)]
        for callback in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            self.remove_callback(callback)
        self.progress = ProgressTable(list(self.held_out.texts), self.clock)
        self.add_callback(self.progress)
        if held_out:
            # This callback is last since it logs when training begins, after the log and the table have begun.
            self.add_callback(HeldOutEvents(eval_steps, self.evaluate))

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
        if not isinstance(self.model, nn.Module):
            return {}
        costs = {"trained_parameters": trained_parameters(self.model), "peak_memory_bytes": peak_memory_bytes()}
        return {**costs, "training_seconds": self.clock.seconds}

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the held-out texts as `midus eval` does, and log `eval_loss` (nats per token) and `perplexity`.

        For a text with a name, the entries are `eval_NAME_loss` and `eval_NAME_perplexity`. For a model that has blocks
        to fetch, `eval_with_blocks` or `eval_NAME_with_blocks` says whether documents fetched the blocks of their
        paths. If a dataset is given, or the run has no held-out text, evaluate as `Trainer.evaluate` does.
        """
        if eval_dataset is not None or not self.held_out.texts:
            return super().evaluate(eval_dataset, *args, **kwargs)
        return self.held_out.evaluate()

    def merge_adapters(self) -> None:
        """Replace a model with adapters by a model without adapters that computes the same."""
        model: Any = self.model
        if has_adapters(model):
            from midus_hf.training.run.adapters import merge_adapters

            self.model = merge_adapters(model)

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


def trained_parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters that train; a sharded parameter counts whole."""
    return sum(whole_numel(parameter) for parameter in model.parameters() if parameter.requires_grad)


def peak_memory_bytes() -> int:
    """Return this process's peak memory so far: allocated by PyTorch on the GPU, or resident without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
