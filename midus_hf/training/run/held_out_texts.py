"""Held-out texts while a run trains: their losses, the best step, and an early stop without improvement."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from midus_hf.evaluation.fetching import fetches_blocks
from midus_hf.training.data.held_out import (
    HeldOut,
    best_step,
    held_out_losses,
    is_stopped_early,
    metric_name,
    perplexity_name,
)
from midus_hf.training.optim.freezing import has_adapters
from midus_hf.training.output.run_checkpoints import checkpoints, damage_of, is_complete
from midus_hf.training.output.saving import say


class HeldOutTexts:
    """Handling of held-out texts by the Trainer of a run; every process measures all texts.

    Args:
        trainer: A Trainer that has its model.
        texts: Held-out texts by name, as in `RunOptions.eval_texts`.
        load_best_model_at_end: Whether a step is saved if the first text's loss is the lowest so far.
        early_stopping_patience: Number of evaluations without improvement after which to stop, as in `RunOptions`.
    """

    def __init__(
        self,
        trainer: Any,
        texts: Mapping[str, HeldOut],
        load_best_model_at_end: bool,
        early_stopping_patience: int | None,
    ):
        self._trainer, self.texts, self._keep_best, self._early_stop = (
            trainer,
            texts,
            load_best_model_at_end,
            early_stopping_patience,
        )

    def evaluate(self) -> dict[str, float]:
        """Measure the texts, log and return the measures, and decide whether to save the step and to end training."""
        trainer = self._trainer
        metrics = self._measure()
        trainer.log(metrics)
        trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
        losses, step = self.losses(), trainer.state.global_step
        if step and self._keep_best and best_step(losses) == step:
            trainer.control.should_save = True
        if step and is_stopped_early(losses, self._early_stop):
            trainer.control.should_training_stop = True
            # A run that stops early ends with a checkpoint, like a run that has taken its last step.
            trainer.control.should_save = trainer.control.should_save or trainer.args.save_strategy != "no"
        return metrics

    def _measure(self) -> dict[str, float]:
        trainer = self._trainer
        model = trainer.model.get_base_model() if has_adapters(trainer.model) else trainer.model
        metrics: dict[str, float] = {}
        for name, text in self.texts.items():
            loss = torch.tensor(math.log(text.measure(model).perplexity), dtype=torch.float64)
            if trainer.args.world_size > 1:
                # All processes measure the same, but rounding must not make them disagree on the best step.
                loss = trainer.accelerator.reduce(loss.float().to(trainer.args.device), reduction="mean")
            metrics[metric_name(name, "loss")] = loss.item()
            metrics[perplexity_name(name)] = math.exp(loss.item())
            if fetches_blocks(model):
                metrics[metric_name(name, "with_blocks")] = text.paths is not None
        return metrics

    def losses(self) -> dict[int, float]:
        """Return the losses of the first text by step, from `held_out_losses`."""
        return held_out_losses(self._trainer.state.log_history, self.texts)

    def step_to_keep(self) -> int | None:
        """Return the step whose checkpoint is kept however old it is, or None."""
        return best_step(self.losses()) if self._keep_best else None

    def load_best(self, damaged: frozenset[int] = frozenset()) -> int:
        """Load the weights of the best step by held-out loss, among the last step and steps with a whole checkpoint.

        Args:
            damaged: Steps whose checkpoints are known to be damaged. Default: none.

        Returns:
            The best step. If it is the last step, nothing is loaded.
        """
        losses, last = self.losses(), self._trainer.state.global_step
        whole_checkpoints = self._whole_checkpoints(damaged)
        step = best_step({step: loss for step, loss in losses.items() if step == last or step in whole_checkpoints})
        assert step is not None, "the last step is always measured"
        if step != last:
            damage = damage_of(whole_checkpoints[step])
            if damage is not None:
                say(f"{whole_checkpoints[step].name}, the best, is passed over: {damage}")
                return self.load_best(frozenset((*damaged, step)))
            self._trainer.checkpoints.load(whole_checkpoints[step])
        if best_step(losses) != step:
            say(
                f"The best model, after step {best_step(losses):,}, has no checkpoint any more; the best that is left is saved."
            )
        name = next(iter(self.texts))
        score = f"held-out perplexity {f'of {name} ' if name else ''}{math.exp(losses[step]):.4f}"
        if step == last:
            say(f"The last model is the best by held-out text: {score}.")
        else:
            say(f"Saved is the model after step {step:,}, the best: {score}, at the end {math.exp(losses[last]):.4f}.")
        return step

    def _whole_checkpoints(self, damaged: frozenset[int]) -> dict[int, Path]:
        paths_by_step = checkpoints(str(self._trainer.args.output_dir))
        return {step: path for step, path in paths_by_step.items() if step not in damaged and is_complete(path)}
