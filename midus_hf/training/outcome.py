"""Whether a run learned: the base and the trained model on held-out texts, in lines that end the run."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

# Nats per token.
_NOTHING = 0.01
_WORSE = 0.005
_RISEN = 0.05


class MeasureAtEnd(TrainerCallback):
    """Measures held-out texts after the last step, where the strategy measures at no end of an epoch."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.eval_strategy != "epoch" and state.global_step >= state.max_steps:
            control.should_evaluate = True


def describe_outcome(log: Sequence[Mapping[str, Any]], saved_step: int, rates: str) -> tuple[list[str], list[str]]:
    """Return lines on what a run learned, and warnings with their remedy.

    Args:
        log: Events of a Trainer: `eval_loss` or `eval_NAME_loss` at step 0 and at the saved step, and training losses, in nats.
        saved_step: Step of the model that is saved.
        rates: The rates of the run, as the remedy names them.
    """
    lines, warnings = [], []
    for name, before, after in _measured(log, saved_step):
        label = f"{name or 'held-out texts'}"
        change = after - before
        lines.append(f"{label}: {before:.4f} nats per token before training, {after:.4f} after ({change:+.4f})")
        if change > _WORSE:
            warnings.append(
                f"the trained model is worse than the one before on {label}: the rate is too high, or the text is another; train "
                f"again at a tenth of {rates}"
            )
        elif change > -_NOTHING:
            warnings.append(f"nothing was learned of {label}: train for more steps, or at ten times {rates}")
    losses = [event["loss"] for event in log if "loss" in event]
    third = len(losses) // 3
    if third >= 2:
        middle, last = losses[-2 * third : -third], losses[-third:]
        risen = sum(last) / third - sum(middle) / third
        if risen > _RISEN:
            warnings.append(
                f"the training loss rose by {risen:.2f} nats in the last third of the steps: train again at a tenth of {rates}"
            )
    return lines, warnings


def _measured(log: Sequence[Mapping[str, Any]], saved_step: int) -> list[tuple[str, float, float]]:
    """Return held-out texts with their losses before the first step and of the saved model."""
    losses: dict[str, dict[int, float]] = {}
    for event in log:
        for key, value in event.items():
            if key.startswith("eval_") and key.endswith("_loss"):
                losses.setdefault(key.removeprefix("eval_").removesuffix("loss").rstrip("_"), {})[event["step"]] = (
                    value
                )
    return [
        (name, by_step[0], by_step[saved_step]) for name, by_step in losses.items() if {0, saved_step} <= {*by_step}
    ]
