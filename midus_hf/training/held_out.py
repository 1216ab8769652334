"""Held-out text during a run: when it is measured, which step was best, and when to stop for want of a better one."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers import (
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from midus_hf.documents import read_documents
from midus_hf.evaluation.perplexity import PreparedText, prepare_text
from midus_hf.training.run_options import RunOptions

LOSS_NAME = "eval_loss"


class HeldOutEvents(TrainerCallback):
    """Ask for an evaluation every so many steps and after the last one, with a log event; and one before the first.

    Args:
        every: Optimizer steps between evaluations; None for those at the start and at the end alone.
        evaluate: Evaluates at once.
    """

    def __init__(self, every: int | None, evaluate: Callable[[], Any]):
        self.every = every
        self._evaluate = evaluate

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == 0:
            self._evaluate()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        due = self.every is not None and state.global_step % self.every == 0
        if due or state.global_step >= state.max_steps:
            control.should_evaluate = control.should_log = True


def prepare_held_out(
    config: RunOptions,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    column: str = "text",
    encoding: str = "utf-8",
) -> PreparedText | None:
    """Read and tokenize the held-out text of a run; None if it has none.

    Args:
        config: The options of the run.
        tokenizer: Of the model.
        model_config: Of the model.
        column: The column, or JSON key, that holds the text. Default: `"text"`.
        encoding: Of plain text and JSON lines. Default: `"utf-8"`.

    Raises:
        ValueError: If the text cannot be read, or there is too little of it.
    """
    if config.eval_text is None:
        return None
    documents = read_documents(config.eval_text, column, encoding)
    try:
        return prepare_text(tokenizer, documents, model_config, max_tokens=config.eval_max_tokens)
    except ValueError as error:
        raise ValueError(f"eval_text is {config.eval_text!r}, which cannot be measured: {error}") from error


def held_out_losses(log: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Losses of held-out text by step, in the order of steps; without that of the model before training.

    Args:
        log: Events of a run.
    """
    return {event["step"]: event[LOSS_NAME] for event in log if LOSS_NAME in event and event["step"] > 0}


def best_step(losses: Mapping[int, float]) -> int | None:
    """The step of the smallest loss, the first of several; None if there is none.

    Args:
        losses: From `held_out_losses`.
    """
    return min(losses, key=lambda step: (losses[step], step), default=None)


def is_stopped_early(losses: Mapping[int, float], early_stop: int | None) -> bool:
    """Whether the last `early_stop` losses are no better than one before them.

    Args:
        losses: From `held_out_losses`.
        early_stop: As in `RunOptions`.
    """
    best = best_step(losses)
    return early_stop is not None and best is not None and sum(step > best for step in losses) >= early_stop
