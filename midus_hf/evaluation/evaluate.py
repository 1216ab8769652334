"""Evaluation of checkpoints, one after the other, with the same settings."""

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.banks.block_reader import check_paths
from midus_hf.config.usable_device import usable_device
from midus_hf.evaluation.fetching import DocumentFinder, PathFinder, fetches_blocks
from midus_hf.evaluation.perplexity import perplexity
from midus_hf.evaluation.settings import EvaluationSettings
from midus_hf.model_names import check_model_name
from midus_hf.saved_models import check_whole, load_model, load_tokenizer, refusing
from midus_hf.topics.documents import DocumentPaths, document_rows, read_documents, read_paths
from midus_hf.topics.text_files import find_files

if TYPE_CHECKING:
    from midus_hf.evaluation.harness import Tasks
    from midus_hf.topics.embedding import TextEmbedder
    from midus_hf.topics.tree import ClusterTree


@dataclasses.dataclass(frozen=True)
class _Finders:
    """Functions that find the path of each document of the text and of each question, and the document in front of a question.

    Paths are found by a tree, or are written in rows of the text.
    """

    of_text: PathFinder | None = None
    of_tasks: PathFinder | None = None
    tree: "ClusterTree | None" = None
    written: DocumentPaths | None = None
    find_documents: DocumentFinder | None = None


class EvaluationInterrupted(KeyboardInterrupt):
    """Interruption of an evaluation.

    Args:
        report: Report of the finished models, as `evaluate` returns it.
        message: Text for a person that says what was finished and what was not.
    """

    def __init__(self, report: dict[str, Any], message: str):
        super().__init__(message)
        self.report = report


def evaluate(models: list[str], settings: EvaluationSettings, quiet: bool = False) -> dict[str, Any]:
    """Evaluate models, and return a report. As much as possible is checked before the first model is loaded.

    Args:
        models: Folders or hub ids of the models.
        settings: What to measure, and how.
        quiet: Whether to hide the harness's own progress bars. Default: False.

    Returns:
        `{"models": [...], "settings": {...}}`; each model is `{"model", "model_type", "parameters", "causal", "perplexity",
        "tasks", "seconds"}`. `causal` is false if a memory gives tokens of plain text information about later tokens,
        `perplexity` has the fields of `PerplexityResult` or is None, and `tasks` maps the name of each task to its metrics.

    Raises:
        ValueError: If a model, a file, a task or another part of the request cannot be used.
        ModuleNotFoundError: If tasks are requested and lm-eval is not installed.
        EvaluationInterrupted: If the evaluation is interrupted while a model is measured.
    """
    for model in models:
        check_model_name("model", model)
    device = usable_device(settings.device)
    documents = None
    if settings.text is not None:
        documents = read_documents(settings.text, settings.column, settings.encoding)
    tasks = None
    if settings.tasks:
        from midus_hf.evaluation.harness import Tasks

        tasks = Tasks(settings.tasks, data=settings.data, include_path=settings.include_path)

    finders = _Finders()
    if settings.path_column is not None:
        assert settings.text is not None, "paths are those of a text"
        rows = document_rows(find_files(settings.text), settings.column, settings.encoding)
        written = read_paths(rows, settings.path_column)
        of_text = torch.from_numpy(written.paths)
        finders = _Finders(of_text=lambda documents: of_text, written=written)
    if settings.retriever is not None:
        from midus_hf.topics.memory_retriever import MemoryRetriever

        retriever = MemoryRetriever.load(settings.retriever, device=device)
        blocked, best = settings.blocked_nodes, settings.best_nodes_blocked
        find_paths = functools.partial(retriever.paths, blocked=blocked, block_best=best)
        # Raises before a model is loaded if nodes to block do not exist.
        retriever.paths_of(torch.zeros(1, retriever.tree.width), blocked, best)
        finders = _Finders(find_paths, find_paths, retriever.tree)
    if settings.documents is not None:
        from midus_hf.topics.embedding import TextEmbedder

        name = settings.embedding_model
        embedder = retriever.embedder if name is None else TextEmbedder(name, device)
        finders = dataclasses.replace(
            finders, find_documents=_nearest_documents(settings, settings.documents, embedder)
        )

    measured: list[dict[str, Any]] = []
    with _answers_file(settings.answers) as write_answer:
        for model in models:
            current: dict[str, Any] = {"model": model}
            try:
                _measure(current, documents, tasks, settings, device, quiet, finders, write_answer)
            except KeyboardInterrupt:
                message = _interruption(measured, current)
                raise EvaluationInterrupted(_report(measured, settings), message) from None
            measured.append(current)
    return _report(measured, settings)


@contextlib.contextmanager
def _answers_file(name: str | None) -> Iterator[Callable[[dict[str, Any]], Any] | None]:
    """Yield a function that writes an answer to a file; None without a file. The file is made first, to refuse it early."""
    if name is None:
        yield None
        return
    try:
        stream = open(name, "x", encoding="utf-8")
    except FileExistsError:
        raise ValueError(f"answers is {name!r}, which exists; choose another file.") from None
    except OSError as error:
        raise ValueError(f"answers is {name!r}, which cannot be written: {error.strerror}.") from error
    try:
        with stream:
            yield lambda row: print(json.dumps(row, ensure_ascii=False, default=str), file=stream)
    finally:
        if not Path(name).stat().st_size:  # nothing was answered, so the same command can be run again
            Path(name).unlink()


def _report(measured: list[dict[str, Any]], settings: EvaluationSettings) -> dict[str, Any]:
    return {"models": measured, "settings": dataclasses.asdict(settings)}


def _interruption(measured: list[dict[str, Any]], current: dict[str, Any]) -> str:
    """Return a message that names the finished models, and the perplexity of the interrupted model if it is known."""
    finished = ", ".join(model["model"] for model in measured) or "no model"
    message = f"interrupted at {current['model']}; finished: {finished}"
    if current.get("perplexity") is not None:
        message += f"; the perplexity of {current['model']} is {current['perplexity']['perplexity']:.4f}"
    return message


def _measure(
    measured: dict[str, Any],
    documents: list[str] | None,
    tasks: "Tasks | None",
    settings: EvaluationSettings,
    device: str,
    quiet: bool,
    finders: _Finders,
    write_answer: Callable[[dict[str, Any]], Any] | None,
) -> None:
    """Measure the model that `measured` names, and add each result to `measured` as soon as it is known."""
    started, name = time.perf_counter(), measured["model"]
    model, tokenizer = _load(name, settings.dtype, device, settings.trust_remote_code)
    if not fetches_blocks(model):
        finders = _Finders(find_documents=finders.find_documents)
    elif finders.tree is not None:
        from midus_hf.topics.tree import check_tree

        check_tree(finders.tree, model)
    elif finders.written is not None:
        banks: Any = model.banks
        for layout in banks.layouts.values():
            check_paths(
                torch.from_numpy(finders.written.paths), layout, f"column {settings.path_column!r} of the text"
            )
        banks.check_tree(finders.written.tree, "the text", "Assign the text by the tree of the model.")
    measured |= {
        "model_type": model.config.model_type,
        "parameters": model.num_parameters(),
        "causal": not _reads_ahead(model),
        "perplexity": None,
        "tasks": {},
    }
    if documents is not None:
        with tqdm(desc=f"perplexity of {name}", unit=" tokens", disable=None) as bar:
            result = perplexity(
                model,
                tokenizer,
                documents,
                sequence_length=settings.sequence_length,
                stride=settings.stride,
                max_tokens=settings.max_tokens,
                batch_size=settings.batch_size,
                progress=functools.partial(_show_progress, bar),
                apart=settings.apart or settings.retriever is not None or settings.path_column is not None,
                find_paths=finders.of_text,
            )
        measured["perplexity"] = dataclasses.asdict(result)
    if tasks is not None:
        with tqdm(desc=f"tasks of {name}", unit=" requests", disable=None if quiet else True) as bar:
            measured["tasks"] = tasks.run(
                model,
                tokenizer,
                num_fewshot=settings.num_fewshot,
                limit=settings.limit,
                batch_size=settings.batch_size,
                seed=settings.seed,
                progress=bar.update,
                quiet=quiet,
                find_paths=finders.of_tasks,
                find_documents=finders.find_documents,
                tell_answer=None if write_answer is None else lambda row: write_answer({"model": name, **row}),
            )
    measured["seconds"] = time.perf_counter() - started


def _reads_ahead(model: PreTrainedModel) -> bool:
    """Return whether a memory of the model gives tokens of plain text information about later tokens."""
    memories = model.config.memories() if hasattr(model.config, "memories") else None
    return memories is not None and (memories.reads_ahead or memories.reads_prompts)


def _nearest_documents(settings: EvaluationSettings, path: str, embedder: "TextEmbedder") -> DocumentFinder:
    """Read and embed the documents from which the nearest is put in front of each question."""
    from midus_hf.topics.nearest_documents import NearestDocuments, cut_into_passages

    documents = read_documents(path, settings.column, settings.encoding)
    if settings.passage_tokens is not None:
        documents = cut_into_passages(documents, embedder.tokenizer, settings.passage_tokens)
    with tqdm(desc="documents embedded", unit=" documents", total=len(documents), disable=None) as bar:
        return NearestDocuments(documents, embedder, bar.update)


def _show_progress(bar: tqdm, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


def _load(
    name: str, dtype: str, device: str, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with refusing(
        f"model is {name!r}, which cannot be loaded", OSError, reason=lambda error: " ".join(str(error).split())
    ):
        tokenizer = load_tokenizer(name, trust_remote_code)
        model, missing = load_model(name, dtype, trust_remote_code, device_map=device)
    check_whole(name, missing)
    return model.eval(), tokenizer
