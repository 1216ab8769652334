"""Held-out text during a run: when it is measured, which step was best, and when to stop for want of a better one."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
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

from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.documents import document_rows, find_files, has_column, read_documents
from midus_hf.documents.document_paths import DocumentPaths, read_paths
from midus_hf.evaluation.perplexity import PerplexityResult, PreparedText, measure, prepare_text
from midus_hf.training.data.clustered_corpus import check_paths
from midus_hf.training.options import CorpusOptions
from midus_hf.training.run_options import RunOptions, text_option


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A held-out text of a run.

    Args:
        text: As it is measured.
        paths: The node of each level that each document is in, `[documents, p]`, int64: by it blocks are fetched. Default: none are.
        tree: Fingerprint of the tree that these are paths of. Default: nobody knows it.
    """

    text: PreparedText
    paths: torch.Tensor | None = None
    tree: str | None = None

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


def check_held_out(config: RunOptions) -> None:
    """See that no two held-out texts of a run are the same.

    Args:
        config: The options of the run.

    Raises:
        ValueError: If two are.
    """
    name_of: dict[Path, str] = {}
    for name, path in config.eval_texts.items():
        place = Path(path).resolve()
        if place in name_of:
            raise ValueError(
                f"eval_text has {path!r} twice, as {name_of[place]!r} and as {name!r}; expected texts that differ. Leave one out."
            )
        name_of[place] = name


def prepare_held_out(
    config: RunOptions,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    corpus: CorpusOptions | None = None,
    banks: Mapping[str, BankLayout] | None = None,
) -> dict[str, HeldOut]:
    """Read and tokenize the held-out texts of a run, by their names as in `RunOptions.eval_texts`; `{}` if it has none.

    Args:
        config: The options of the run.
        tokenizer: Of the model.
        model_config: Of the model.
        corpus: Whose columns and encoding those of the held-out texts are. Default: text under `"text"`, in UTF-8, without paths.
        banks: Of the model, from which texts fetch blocks, by the name of the memory. Default: none.

    Raises:
        ValueError: If a text cannot be read, or there is too little of it; if some of its documents have a path and others none,
            or the paths are those of another tree.
    """
    texts: dict[str, HeldOut] = {}
    for name, path in config.eval_texts.items():
        read_as = CorpusOptions(path=path) if corpus is None else corpus
        documents = read_documents(path, read_as.column, read_as.encoding)
        try:
            found = _paths_of(path, read_as, banks or {})
            # A document that has a path of its own is measured by itself, as midus eval does with a retriever.
            text = prepare_text(
                tokenizer, documents, model_config, max_tokens=config.eval_max_tokens, apart=found is not None
            )
        except ValueError as error:
            raise ValueError(f"{text_option(name)} is {path!r}, which cannot be measured: {error}") from error
        texts[name] = HeldOut(text) if found is None else HeldOut(text, torch.from_numpy(found.paths), found.tree)
    return texts


def _paths_of(path: str, corpus: CorpusOptions, banks: Mapping[str, BankLayout]) -> DocumentPaths | None:
    """The paths of held-out documents; None if no document has one."""
    column = corpus.path_column
    if column is None or not has_column(path, column, corpus.encoding):
        return None
    documents = read_paths(document_rows(find_files(path), corpus.column, corpus.encoding), column)
    check_paths(documents.paths, banks, column, "it")
    return documents


def describe_held_out(held_out: Mapping[str, HeldOut], corpus: CorpusOptions | None = None) -> list[str]:
    """What a person is told of held-out texts that have names or could fetch blocks, a sentence each.

    Args:
        held_out: Of the run.
        corpus: The first of the run. Default: one without paths.
    """
    column = None if corpus is None else corpus.path_column
    lines = []
    for name, of_name in held_out.items():
        called = f"held-out text {name}".rstrip()
        if name:
            lines.append(f"{called}: {of_name.text.num_tokens:,} tokens to predict")
        if column is not None and of_name.paths is not None:
            lines.append(
                f"{called}: {len(of_name.paths):,} documents, each measured by itself, with the blocks of its path"
            )
        elif column is not None:
            lines.append(
                f"{called} has no column {column!r}, which midus cluster assign writes: it is measured without blocks"
            )
    return lines


def metric_name(text: str, measure: str) -> str:
    """What the log calls a measure of a held-out text: `eval_loss`, `eval_wiki_loss`.

    Args:
        text: The name of the text; `""` for one that has none.
        measure: `"loss"` or another.
    """
    return "_".join(("eval", *([text] if text else []), measure))


def perplexity_name(text: str) -> str:
    """What the log calls the perplexity of a held-out text: `perplexity`, `eval_wiki_perplexity`.

    Args:
        text: As in `metric_name`.
    """
    return metric_name(text, "perplexity") if text else "perplexity"


def held_out_losses(log: Iterable[Mapping[str, Any]], texts: Mapping[str, Any]) -> dict[int, float]:
    """Losses of the first held-out text by step, in the order of steps; without that of the model before training.

    Args:
        log: Events of a run.
        texts: By name, as in `RunOptions.eval_texts`.
    """
    name = metric_name(next(iter(texts), ""), "loss")
    return {event["step"]: event[name] for event in log if name in event and event["step"] > 0}


def best_step(losses: Mapping[int, float]) -> int | None:
    """The step of the smallest loss, the first of several; None if there is none.

    Args:
        losses: From `held_out_losses`.
    """
    return min(losses, key=lambda step: (losses[step], step), default=None)


def is_stopped_early(losses: Mapping[int, float], early_stopping_patience: int | None) -> bool:
    """Whether the last `early_stopping_patience` losses are no better than one before them.

    Args:
        losses: From `held_out_losses`.
        early_stopping_patience: As in `RunOptions`.
    """
    best = best_step(losses)
    return (
        early_stopping_patience is not None
        and best is not None
        and sum(step > best for step in losses) >= early_stopping_patience
    )
