"""The Trainer of a run: its table, its held-out text, and its checkpoints, which may fail to be written."""

import contextlib
import math
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback

from midus_hf.evaluation.fetching import fetches_blocks
from midus_hf.files.checkpoint_files import BLOCK_STATES
from midus_hf.files.run_files import remove_written
from midus_hf.models.fetching import Banks
from midus_hf.models.host import MemoryModel
from midus_hf.training.data.held_out import (
    HeldOut,
    HeldOutEvents,
    best_step,
    held_out_losses,
    is_stopped_early,
    metric_name,
    perplexity_name,
)
from midus_hf.training.optim.cut_parameters import whole_numel
from midus_hf.training.optim.finite import error_of, first_not_finite, first_not_finite_in, trained_tensors
from midus_hf.training.output.frozen_weights import FrozenWeights
from midus_hf.training.output.resumption import StepSize
from midus_hf.training.output.run_checkpoints import (
    begin_checkpoint,
    checkpoints,
    damage_of,
    finish_checkpoint,
    is_complete,
    last_checkpoint,
    linked_entries,
    remove_old_checkpoints,
)
from midus_hf.training.output.saving import say, write_failure
from midus_hf.training.run.interruption import Interruption
from midus_hf.training.run.progress import ProgressTable
from midus_hf.training.run.training_clock import TrainingClock
from midus_hf.training.trainer.memory_trainer import TrainsMemory

_OF_ANOTHER_PROCESS = "another process could not write its part"


class InRun(TrainsMemory):
    """Mixin for a Trainer that prints a table, measures held-out text, and goes on if a checkpoint cannot be written.

    Held-out texts are measured whole by every process; where the first is best, a checkpoint can be kept. The tokenizer is
    saved here, since a Trainer that is given it also rewrites the special tokens in the model's config.

    Args:
        tokenizer: Saved beside every checkpoint.
        keep_checkpoints: Latest checkpoints to keep; None keeps all. Default: all.
        held_out: Texts to measure, by their names as in `RunOptions.eval_texts`. Default: none.
        eval_every: As in `RunOptions`. Default: none.
        keep_best: As in `RunOptions`. Default: false.
        early_stop: As in `RunOptions`. Default: none.
        max_seconds: As in `RunOptions`. Default: none.
        kwargs: What the Trainer takes. `save_total_limit` is not for this class.
    """

    def __init__(
        self,
        *args: Any,
        tokenizer: PreTrainedTokenizerBase,
        keep_checkpoints: int | None = None,
        held_out: Mapping[str, HeldOut] | None = None,
        eval_every: int | None = None,
        keep_best: bool = False,
        early_stop: int | None = None,
        max_seconds: float | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        assert self.args.save_total_limit is None, (
            "checkpoints are removed here, once all processes have written theirs"
        )
        self.tokenizer = tokenizer
        self.keep_checkpoints = keep_checkpoints
        self.held_out, self.keep_best, self.early_stop = held_out or {}, keep_best, early_stop
        self.save_failure: str | None = None
        """Why the last checkpoint could not be written; None if it was."""
        self._parts_failed = False
        self._frozen_weights = FrozenWeights(copies=1 if keep_checkpoints == 1 else 2)
        self._is_writing_checkpoint = False
        self.interruption = Interruption(self._largest)
        self.clock = TrainingClock(max_seconds, self._largest, bool(self.held_out))
        # Before the log, which has an event wherever there is a checkpoint.
        self.callback_handler.callbacks[:0] = [self.clock, self.interruption, StepSize(self.args)]
        for talkative in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            self.remove_callback(talkative)
        self.progress = ProgressTable(list(self.held_out), self.clock)
        self.add_callback(self.progress)
        if self.held_out:
            # Last, since it logs when training begins: by then the log and the table have begun.
            self.add_callback(HeldOutEvents(eval_every, self.evaluate))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer.log`; with the loss it tells how long training has taken, and whether that has ended it.

        The last event of a run also tells what it cost: `trained_parameters` and `peak_memory_bytes`.
        """
        if "train_loss" in logs:
            logs |= self._costs()
        if "loss" in logs:
            logs["training_seconds"] = self.clock.seconds
            if self.clock.has_ended_training:
                logs["ended_by_max_seconds"] = True
        super().log(logs, start_time)

    def log_costs(self) -> None:
        """Log what a run cost whose last step was taken before: the process that took it may have ended before it could say so."""
        self.log(self._costs())

    def _costs(self) -> dict[str, float]:
        if not isinstance(self.model, nn.Module):
            return {}
        costs = {"trained_parameters": trained_parameters(self.model), "peak_memory_bytes": peak_memory_bytes()}
        return {**costs, "training_seconds": self.clock.seconds}

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the held-out texts as `perplexity` does, and log `eval_loss` (nats per token) and `perplexity`.

        Of texts that have names, these are `eval_NAME_loss` and `eval_NAME_perplexity`. Of a model that has blocks to fetch,
        `eval_with_blocks` or `eval_NAME_with_blocks` says whether documents fetched those of their paths.
        As `Trainer.evaluate` where a dataset is given, or the run has no held-out text.
        """
        if eval_dataset is not None or not self.held_out:
            return super().evaluate(eval_dataset, *args, **kwargs)
        model: Any = self.model
        model = model.get_base_model() if _has_adapters(model) else model
        metrics: dict[str, float] = {}
        for name, text in self.held_out.items():
            loss = torch.tensor(math.log(text.measure(model).perplexity), dtype=torch.float64)
            if self.args.world_size > 1:
                # They measure the same, but must not disagree by a rounding on which step was best.
                loss = self.accelerator.reduce(loss.float().to(self.args.device), reduction="mean")
            metrics[metric_name(name, "loss")] = loss.item()
            metrics[perplexity_name(name)] = math.exp(loss.item())
            if fetches_blocks(model):
                metrics[metric_name(name, "with_blocks")] = text.paths is not None
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        losses = self.held_out_losses()
        step = self.state.global_step
        if step and self.keep_best and best_step(losses) == step:
            self.control.should_save = True
        if step and is_stopped_early(losses, self.early_stop):
            self.control.should_training_stop = True
            # To be resumed, as it were, like a run that has taken its last step.
            self.control.should_save = self.control.should_save or self.args.save_strategy != "no"
        return metrics

    def held_out_losses(self) -> dict[int, float]:
        """Losses of the first held-out text by step, as `held_out.held_out_losses` gives them."""
        return held_out_losses(self.state.log_history, self.held_out)

    def load_best(self, damaged: frozenset[int] = frozenset()) -> int:
        """Give the model the weights of the step whose held-out text was best, of those whose checkpoint was kept and is whole.

        Args:
            damaged: Steps whose checkpoints are known not to be. Default: none.

        Returns:
            That step. For the last step nothing is loaded.
        """
        losses, last = self.held_out_losses(), self.state.global_step
        found = checkpoints(str(self.args.output_dir))
        kept = {step: path for step, path in found.items() if step not in damaged and is_complete(path)}
        step = best_step({step: loss for step, loss in losses.items() if step == last or step in kept})
        assert step is not None, "the last step is always measured"
        if step != last:
            damage = damage_of(kept[step])
            if damage is not None:
                say(f"{kept[step].name}, the best, is passed over: {damage}")
                return self.load_best(frozenset((*damaged, step)))
            self.load_checkpoint(kept[step])
        overall = best_step(losses)
        assert overall is not None
        if overall != step:
            say(f"The best model, after step {overall:,}, has no checkpoint any more; the best that is left is saved.")
        name = next(iter(self.held_out))
        score = f"held-out perplexity {f'of {name} ' if name else ''}{math.exp(losses[step]):.4f}"
        if step == last:
            say(f"The last model is the best by held-out text: {score}.")
        else:
            say(f"Saved is the model after step {step:,}, the best: {score}, at the end {math.exp(losses[last]):.4f}.")
        return step

    def load_checkpoint(self, checkpoint: Path) -> None:
        """Give the model the weights of a checkpoint.

        Args:
            checkpoint: Its folder.
        """
        self._load_from_checkpoint(str(checkpoint))

    def merge_adapters(self) -> None:
        """Let the model be one without adapters, if it has any, that computes the same."""
        model: Any = self.model
        if _has_adapters(model):
            from midus_hf.training.run.adapters import merge_adapters

            self.model = merge_adapters(model)

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

    def refuse_not_finite(self) -> None:
        """End the run if a tensor or block that trains is not finite, before it is saved; all processes call it.

        Raises:
            FloatingPointError: If one is not, in whichever process.
        """
        assert isinstance(self.model, nn.Module)
        found = next(
            filter(
                None,
                (
                    first_not_finite(trained_tensors(self.model)),
                    *(bank.first_not_finite() for bank in self.blocks.banks),
                ),
            ),
            None,
        )
        if self._largest(found is not None):
            raise error_of(found or "what another process trains is not finite", self.state.global_step)

    def first_not_finite_in(self, checkpoint: Path) -> str | None:
        """Return what in a checkpoint trains and is not finite, as "NAME holds nan", or None.

        Args:
            checkpoint: Its folder, which is whole.
        """
        assert isinstance(self.model, nn.Module)
        frozen = (name for name, parameter in self.model.named_parameters() if not parameter.requires_grad)
        found = first_not_finite_in(checkpoint, frozen)
        states = ((bank, checkpoint / BLOCK_STATES / str(number)) for number, bank in enumerate(self.blocks.banks))
        return found or next(filter(None, (bank.first_not_finite_in(folder) for bank, folder in states)), None)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """As `Trainer._save_checkpoint`; where a file cannot be written, what there is of the checkpoint is removed.

        The checkpoint is whole with its manifest, which is written when every process has written its part and all of these are on
        the disk. Only then older checkpoints go.

        Raises:
            FloatingPointError: If what trains is not finite; nothing is written then.
        """
        self.refuse_not_finite()
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial), f"checkpoint-{step}")
        self.save_failure, self._parts_failed = None, False
        beside: list[Path] = []
        earlier = self._frozen_weights.earlier(folder)
        assert isinstance(self.model, nn.Module)
        banks = _open_banks(self.model)

        def begin() -> None:
            beside.extend(begin_checkpoint(folder))
            self.tokenizer.save_pretrained(folder)

        def write() -> None:
            self._is_writing_checkpoint = True
            try:
                with contextlib.ExitStack() as linking:
                    for each in banks:
                        linking.enter_context(each.linking(earlier, self._frozen_weights.copies))
                    super(InRun, self)._save_checkpoint(model, trial)
            finally:
                self._is_writing_checkpoint = False

        def finish() -> None:
            finish_checkpoint(folder, beside, linked_entries(folder, earlier[-2:]))
            self._frozen_weights.know(folder)

        parts = (begin if self.args.should_save else _nothing, write, finish if self.args.should_save else _nothing)
        failed = any(self._cannot_write(part) for part in parts)
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
            best = best_step(self.held_out_losses()) if self.keep_best else None
            remove_old_checkpoints(folder.parent, step, self.keep_checkpoints, best)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As `Trainer._save`; of a checkpoint whose frozen weights lie in an earlier one as well, these are linked."""
        whole = state_dict is None and self.tables.columns is None and not _has_adapters(self.model)
        if not (self._is_writing_checkpoint and self.args.should_save and whole):
            super()._save(output_dir, state_dict)
            return
        assert output_dir is not None and isinstance(self.model, nn.Module)
        save = super()._save
        self._frozen_weights.save(Path(output_dir), self.model, lambda weights: save(output_dir, weights))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._frozen_weights.know(Path(resume_from_checkpoint))

    def _cannot_write(self, part: Callable[[], None]) -> bool:
        """Do a part of saving; return whether a file could not be written in any process, which `save_failure` tells. All call it."""
        failure = None
        try:
            part()
        except Exception as error:
            failure = write_failure(error)
            if failure is None:
                raise
        # What is asked here is answered there where a process has not come so far as `_save_rng_state`.
        failed = self._parts_failed or bool(self._largest(failure is not None))
        if failed:
            self.save_failure = failure or _OF_ANOTHER_PROCESS
        return failed

    def _save_rng_state(self, output_dir: str) -> None:
        """As `Trainer._save_rng_state`; it ends when all processes have written theirs: then the checkpoint is said to be whole.

        Raises:
            OSError: If one could not, or has failed before.
        """
        failure = None
        try:
            super()._save_rng_state(output_dir)  # type: ignore[misc]
        except Exception as error:
            failure = write_failure(error)
            if failure is None:
                raise
        self._parts_failed = bool(self._largest(failure is not None))
        if self._parts_failed:
            raise OSError(failure or _OF_ANOTHER_PROCESS)

    def _largest(self, number: int) -> int:
        """The largest of the numbers of all processes."""
        if self.args.world_size == 1:
            return int(number)
        numbers = self.accelerator.gather(torch.tensor([int(number)], device=self.args.device))
        return int(numbers.max())


def _open_banks(model: torch.nn.Module) -> list[Banks]:
    """Return the banks of a model, PEFT's wrapper aside, that are open."""
    modules = (module for module in model.modules() if isinstance(module, MemoryModel))
    return [module.own_banks for module in modules if module.own_banks.are_open]


def _nothing() -> None:
    """Do what a process does while the main one writes."""


def _has_adapters(model: Any) -> bool:
    """Whether PEFT has wrapped it; PEFT itself need not be there."""
    return hasattr(model, "peft_config")


class RunTrainer(InRun, Trainer):
    """The Trainer of a run of continual pretraining."""


def trained_parameters(model: nn.Module) -> int:
    """Parameters that train; a sharded one counts whole.

    Args:
        model: As a run has it.
    """
    return sum(whole_numel(parameter) for parameter in model.parameters() if parameter.requires_grad)


def peak_memory_bytes() -> int:
    """The most memory of this process so far: of its GPU what PyTorch allocated there, without one what was resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
