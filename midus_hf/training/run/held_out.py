"""Held-out text in a run: what is measured and when, which step is best, and an early stop without improvement."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
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
from midus_hf.evaluation.fetching import fetches_blocks
from midus_hf.evaluation.perplexity import PerplexityResult, PreparedText, measure, prepare_text
from midus_hf.topics.documents import DocumentPaths, document_rows, has_column, read_documents, read_paths
from midus_hf.topics.text_files import find_files
from midus_hf.training.data.clustered_corpus import check_paths
from midus_hf.training.optim.freezing import has_adapters
from midus_hf.training.options import CorpusOptions
from midus_hf.training.output.disk_room import say
from midus_hf.training.output.run_checkpoints import checkpoints, damage_of, is_complete
from midus_hf.training.run_options import RunOptions, text_option


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A held-out text of a run.

    Args:
        paths: `[documents, p]`, int64, the node of each level that a document is in, by which it fetches blocks.
            Default: None, no blocks are fetched.
        tree: Fingerprint of the tree that the paths belong to. Default: None, unknown.
    """

    text: PreparedText
    paths: torch.Tensor | None = None
    tree: str | None = None

    def measure(self, model: Any) -> PerplexityResult:
        """Measure the perplexity of the text under a model; a document that has a path fetches its blocks.

        Raises:
            RuntimeError: If the likelihood of the text is not a finite number.
        """
        paths = self.paths
        return measure(model, self.text, find_paths=None if paths is None else lambda documents: paths)


def check_held_out(config: RunOptions) -> None:
    """Check that no two held-out texts of a run are the same file or folder, or raise `ValueError`."""
    name_of: dict[Path, str] = {}
    for name, path in config.eval_texts.items():
        resolved = Path(path).resolve()
        if resolved in name_of:
            raise ValueError(
                f"eval_text has {path!r} twice, as {name_of[resolved]!r} and as {name!r}; expected texts that differ. Leave one out."
            )
        name_of[resolved] = name


def prepare_held_out(
    config: RunOptions,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    corpus: CorpusOptions | None = None,
    banks: Mapping[str, BankLayout] | None = None,
) -> dict[str, HeldOut]:
    """Read and tokenise the held-out texts of a run; return them by name as in `RunOptions.eval_texts`.

    Args:
        config: Options of the run, of which `eval_text` and `eval_max_tokens` are read.
        model_config: Config of the model, whose number of positions bounds the length of contexts.
        corpus: Corpus whose columns and encoding the held-out texts share. Default: text under `"text"`, in UTF-8,
            without paths.
        banks: Layouts of the banks from which texts fetch blocks, by the name of the memory. Default: none.

    Raises:
        ValueError: If a text cannot be read or is too short; if only some of its documents have paths, or the paths
            belong to another tree.
    """
    texts: dict[str, HeldOut] = {}
    for name, path in config.eval_texts.items():
        read_as = CorpusOptions(path=path) if corpus is None else corpus
        documents = read_documents(path, read_as.column, read_as.encoding)
        try:
            document_paths = _paths_of(path, read_as, banks or {})
            # Each document that has a path is measured separately, as midus eval does with a retriever.
            text = prepare_text(
                tokenizer, documents, model_config, max_tokens=config.eval_max_tokens, apart=document_paths is not None
            )
        except ValueError as error:
            raise ValueError(f"{text_option(name)} is {path!r}, which cannot be measured: {error}") from error
        texts[name] = HeldOut(text)
        if document_paths is not None:
            texts[name] = HeldOut(text, torch.from_numpy(document_paths.paths), document_paths.tree)
    return texts


def _paths_of(path: str, corpus: CorpusOptions, banks: Mapping[str, BankLayout]) -> DocumentPaths | None:
    """Return the paths of held-out documents, or None if the text has no column of paths."""
    column = corpus.path_column
    if column is None or not has_column(path, column, corpus.encoding):
        return None
    documents = read_paths(document_rows(find_files(path), corpus.column, corpus.encoding), column)
    check_paths(documents.paths, banks, column, "it")
    return documents


def describe_held_out(held_out: Mapping[str, HeldOut], corpus: CorpusOptions | None = None) -> list[str]:
    """Return sentences about the held-out texts that have names, or that could fetch blocks.

    Args:
        corpus: The first corpus of the run. Default: None, a corpus without paths.
    """
    column = None if corpus is None else corpus.path_column
    lines = []
    for name, prepared in held_out.items():
        label = f"held-out text {name}".rstrip()
        if name:
            lines.append(f"{label}: {prepared.text.num_tokens:,} tokens to predict")
        if column is not None and prepared.paths is not None:
            lines.append(
                f"{label}: {len(prepared.paths):,} documents, each measured by itself, with the blocks of its path"
            )
        elif column is not None:
            lines.append(
                f"{label} has no column {column!r}, which midus cluster assign writes: it is measured without blocks"
            )
    return lines


def metric_name(text: str, measure: str) -> str:
    """Return the name that a measure of a held-out text has in the log, such as `eval_loss` or `eval_wiki_loss`."""
    return "_".join(("eval", *([text] if text else []), measure))


def perplexity_name(text: str) -> str:
    """Return the name that a held-out text's perplexity has in the log: `perplexity` or, say, `eval_wiki_perplexity`."""
    return metric_name(text, "perplexity") if text else "perplexity"


def held_out_losses(log: Iterable[Mapping[str, Any]], texts: Mapping[str, Any]) -> dict[int, float]:
    """Return the losses of the first held-out text by step, in the order of the log, without the loss before training.

    Args:
        texts: Held-out texts by name, as in `RunOptions.eval_texts`.
    """
    name = metric_name(next(iter(texts), ""), "loss")
    return {event["step"]: event[name] for event in log if name in event and event["step"] > 0}


def best_step(losses: Mapping[int, float]) -> int | None:
    """Return the step of the smallest of `held_out_losses`, the earliest one on a tie; None if there are no losses."""
    return min(losses, key=lambda step: (losses[step], step), default=None)


def is_stopped_early(losses: Mapping[int, float], early_stopping_patience: int | None) -> bool:
    """Return whether the last `early_stopping_patience` of `held_out_losses` are no better than an earlier loss."""
    best = best_step(losses)
    return (
        early_stopping_patience is not None
        and best is not None
        and sum(step > best for step in losses) >= early_stopping_patience
    )


class HeldOutTexts(TrainerCallback):
    """Held-out texts of a Trainer of a run, which every process measures: before the first step, at intervals and at the end.

    This is also a callback, which requests evaluations with log events.

    Args:
        config: Options of the run: when texts are measured, and what follows from their losses.
    """

    def __init__(self, trainer: Any, texts: Mapping[str, HeldOut], config: RunOptions):
        self._trainer, self.texts, self._config = trainer, texts, config

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.texts and state.global_step == 0:
            self._trainer.evaluate()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        every = self._config.eval_steps
        due = every is not None and state.global_step % every == 0
        if self.texts and (due or state.global_step >= state.max_steps):
            control.should_evaluate = control.should_log = True

    def evaluate(self) -> dict[str, float]:
        """Measure the texts, log and return the measures, and decide whether to save the step and to end training."""
        trainer = self._trainer
        metrics = self._measure()
        trainer.log(metrics)
        trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
        step = trainer.state.global_step
        if step and self.step_to_keep() == step:
            trainer.control.should_save = True
        if step and is_stopped_early(self.losses(), self._config.early_stopping_patience):
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
        return best_step(self.losses()) if self._config.load_best_model_at_end else None

    def load_best(self) -> int:
        """Load the weights of the best step by held-out loss, among the last step and steps with a whole checkpoint.

        Returns:
            The best step. If it is the last step, nothing is loaded.
        """
        losses, last = self.losses(), self._trainer.state.global_step
        saved = checkpoints(str(self._trainer.args.output_dir))
        whole = {step: path for step, path in saved.items() if is_complete(path)}
        while True:
            step = best_step({step: loss for step, loss in losses.items() if step == last or step in whole})
            assert step is not None, "the last step is always measured"
            damage = None if step == last else damage_of(whole[step])
            if damage is None:
                break
            say(f"{whole.pop(step).name}, the best, is passed over: {damage}")
        if step != last:
            self._trainer.checkpoints.load(whole[step])
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
