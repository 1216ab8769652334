"""Evaluation of checkpoints, one after the other, with the same settings."""

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.banks.block_reader import check_paths
from midus_hf.evaluation.fetching import PathFinder, fetches_blocks
from midus_hf.evaluation.perplexity import perplexity
from midus_hf.evaluation.settings import EvaluationSettings
from midus_hf.model_names import check_model_name, usable_device
from midus_hf.saved_models import check_whole, load_model, load_tokenizer, refusing
from midus_hf.topics.documents import DocumentPaths, documents_of, read_documents, read_paths

if TYPE_CHECKING:
    from midus_hf.evaluation.harness import Tasks
    from midus_hf.topics.memory_retriever import MemoryRetriever


@dataclasses.dataclass(frozen=True)
class _Request:
    """Texts and tasks that are measured of each model, read before the first model is loaded, with the paths of texts."""

    settings: EvaluationSettings
    device: str
    documents: list[str] | None
    tasks: "Tasks | None"
    retriever: "MemoryRetriever | None"
    written: DocumentPaths | None


def evaluate(models: list[str], settings: EvaluationSettings, quiet: bool = False) -> dict[str, Any]:
    """Evaluate models, and return a report. As much as possible is checked before the first model is loaded.

    Args:
        models: Folders or hub ids of the models.
        settings: What to measure, and how.
        quiet: Whether to hide the harness's progress bars. Default: False.

    Returns:
        `{"models": [...], "settings": {...}}`; each model is `{"model", "model_type", "parameters", "causal", "perplexity",
        "tasks", "seconds"}`. `causal` is false if a memory gives tokens of plain text information about later tokens,
        `perplexity` has the fields of `PerplexityResult` or is None, and `tasks` maps the name of each task to its metrics.

    Raises:
        ValueError: If a model, a file, a task or another part of the request cannot be used.
        ModuleNotFoundError: If tasks are requested and lm-eval is not installed.
    """
    for model in models:
        check_model_name("model", model)
    device = usable_device(settings.device)
    documents = tasks = retriever = written = None
    if settings.text is not None:
        documents = read_documents(settings.text, settings.column)
        if settings.path_column is not None:
            written = read_paths(documents_of(settings.text, settings.column), settings.path_column)
    if settings.tasks:
        from midus_hf.evaluation.harness import Tasks

        tasks = Tasks(settings.tasks, data=settings.data, include_path=settings.include_path)
    if settings.retriever is not None:
        from midus_hf.topics.memory_retriever import MemoryRetriever

        retriever = MemoryRetriever.load(settings.retriever, device=device)
    request = _Request(settings, device, documents, tasks, retriever, written)
    return {"models": [_measure(name, request, quiet) for name in models], "settings": dataclasses.asdict(settings)}


def _measure(name: str, request: _Request, quiet: bool) -> dict[str, Any]:
    """Return the measures of a model."""
    started, settings = time.perf_counter(), request.settings
    model, tokenizer = _load(name, settings.dtype, request.device, settings.trust_remote_code)
    find_paths: PathFinder | None = None
    if fetches_blocks(model) and request.retriever is not None:
        from midus_hf.topics.tree import check_tree

        check_tree(request.retriever.tree, model)
        find_paths = request.retriever.paths
    elif fetches_blocks(model) and request.written is not None:
        banks: Any = model.banks
        paths = torch.from_numpy(request.written.paths)
        for layout in banks.layouts.values():
            check_paths(paths, layout, f"column {settings.path_column!r} of the text")
        banks.check_tree(request.written.tree, "the text", "Assign the text by the tree of the model.")
        find_paths = lambda documents: paths  # noqa: E731
    measured = {
        "model": name,
        "model_type": model.config.model_type,
        "parameters": model.num_parameters(),
        "causal": not _reads_ahead(model),
        "perplexity": None,
        "tasks": {},
    }
    if request.documents is not None:
        with tqdm(desc=f"perplexity of {name}", unit=" tokens", disable=None) as bar:

            def show(tokens: int, total: int) -> None:
                bar.total = total
                bar.update(tokens)

            result = perplexity(
                model,
                tokenizer,
                request.documents,
                sequence_length=settings.sequence_length,
                max_tokens=settings.max_tokens,
                batch_size=settings.batch_size,
                progress=show,
                apart=settings.retriever is not None or settings.path_column is not None,
                find_paths=find_paths,
            )
        measured["perplexity"] = dataclasses.asdict(result)
    if request.tasks is not None:
        measured["tasks"] = request.tasks.run(
            model,
            tokenizer,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            batch_size=settings.batch_size,
            quiet=quiet,
            find_paths=find_paths if request.retriever is not None else None,
        )
    return {**measured, "seconds": time.perf_counter() - started}


def _reads_ahead(model: PreTrainedModel) -> bool:
    """Return whether a memory of the model gives tokens of plain text information about later tokens."""
    memories = model.config.memories() if hasattr(model.config, "memories") else None
    return memories is not None and (memories.reads_ahead or memories.reads_prompts)


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
