"""Held-out text during a run: when it is measured, which step was best, and when to stop for want of a better one."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from midus_config.fetched_blocks import BankLayout
from midus_hf.documents import find_files, read_documents, rows_of
from midus_hf.evaluation.perplexity import PerplexityResult, PreparedText, measure, prepare_text
from midus_hf.training.clustered_corpus import check_paths, read_paths
from midus_hf.training.corpus import LocalText
from midus_hf.training.options import CorpusOptions
from midus_hf.training.run_options import RunOptions

LOSS_NAME = "eval_loss"


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out text of a run.

    Args:
        text: As it is measured.
        paths: The node of each level that each document is in, `[documents, p]`, int64: by it blocks are fetched. Default: none are.
    """

    text: PreparedText
    paths: torch.Tensor | None = None

    def measure(self, model: Any) -> PerplexityResult:
        """Measure a model, each document with the blocks of its path if it has one.

        Raises:
            RuntimeError: If the likelihood of the text is not a finite number.
        """
        paths = self.paths
        return measure(model, self.text, find_paths=None if paths is None else lambda documents: paths)


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
    corpus: CorpusOptions | None = None,
    banks: Mapping[str, BankLayout] | None = None,
) -> HeldOut | None:
    """Read and tokenize the held-out text of a run; None if it has none.

    Args:
        config: The options of the run.
        tokenizer: Of the model.
        model_config: Of the model.
        corpus: Whose columns and encoding those of the held-out text are. Default: text under `"text"`, in UTF-8, without paths.
        banks: Of the model, from which texts fetch blocks, by the name of the memory. Default: none.

    Raises:
        ValueError: If the text cannot be read, or there is too little of it; if some of its documents have a path and others none,
            or the paths are those of another tree.
    """
    if config.eval_text is None:
        return None
    corpus = CorpusOptions(path=config.eval_text) if corpus is None else corpus
    documents = read_documents(config.eval_text, corpus.column, corpus.encoding)
    try:
        paths = _paths_of(config.eval_text, corpus, banks or {})
        # A document that has a path of its own is measured by itself, as midus-eval does with a retriever.
        text = prepare_text(
            tokenizer, documents, model_config, max_tokens=config.eval_max_tokens, apart=paths is not None
        )
        return HeldOut(text, paths)
    except ValueError as error:
        raise ValueError(f"eval_text is {config.eval_text!r}, which cannot be measured: {error}") from error


def _paths_of(path: str, corpus: CorpusOptions, banks: Mapping[str, BankLayout]) -> torch.Tensor | None:
    """The paths of held-out documents, `[documents, p]`; None if no document has one."""
    column = corpus.path_column
    files = find_files(path)
    if column is None or not any(column in row for file in files for _, row in rows_of(file, corpus.encoding) or ()):
        return None
    paths = read_paths(LocalText(dataclasses.replace(corpus, path=path), files), column)
    check_paths(paths, banks, column, "it")
    return torch.from_numpy(paths)


def describe_held_out(held_out: HeldOut | None, corpus: CorpusOptions) -> list[str]:
    """What a person is told of held-out text that could fetch blocks, a sentence.

    Args:
        held_out: Of the run.
        corpus: The first of the run.
    """
    if held_out is None or corpus.path_column is None:
        return []
    if held_out.paths is None:
        return [
            f"held-out text has no column {corpus.path_column!r}, which midus-cluster assign writes: it is measured without blocks"
        ]
    return [f"held-out text: {len(held_out.paths):,} documents, each measured by itself, with the blocks of its path"]


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
