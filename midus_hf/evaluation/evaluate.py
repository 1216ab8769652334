"""Evaluation of checkpoints, one after the other, with the same settings."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from midus_hf.data.corpus import DocumentPaths, read_corpus, read_paths
from midus_hf.evaluation.fetching import PathFinder, fetches_blocks, open_retriever
from midus_hf.evaluation.settings import EvaluationSettings
from midus_hf.evaluation.text_rows import row_losses, text_rows
from midus_hf.memories.hierarchical.bank import check_paths
from midus_hf.memories.hierarchical.fetching import check_tree
from midus_hf.models.saved_models import load_for_reading
from midus_hf.sources.names import usable_device
from midus_hf.topics.tree import ClusterTree

if TYPE_CHECKING:
    from midus_hf.evaluation.harness import Tasks


def evaluate(models: list[str], settings: EvaluationSettings) -> dict[str, Any]:
    """Evaluate models, and return a report. As much as possible is checked before the first model is loaded."""
    usable_device(settings.device)
    if settings.retriever is not None:
        ClusterTree.load(settings.retriever)  # a tree that cannot be read is refused, even if no model fetches blocks
    documents = tasks = written = None
    dataset: dict[str, str | None] = {"id": None, "config": None, "split": None}
    if settings.text is not None:
        texts = read_corpus(settings.text, key="text", text_column=settings.column)
        documents = texts[settings.column][:]
        if not Path(settings.text).expanduser().exists():
            dataset = {"id": settings.text, "config": texts.config_name, "split": str(texts.split)}
        if settings.path_column is not None:
            written = read_paths(texts, settings.path_column, f"text {settings.text!r}")
    if settings.tasks:
        from midus_hf.evaluation.harness import Tasks

        tasks = Tasks(settings.tasks, data=settings.data, include_path=settings.include_path)
    measured = [_measure(name, settings, documents, dataset, written, tasks) for name in models]
    return {"models": measured, "settings": dataclasses.asdict(settings)}


def _measure(
    name: str,
    settings: EvaluationSettings,
    documents: list[str] | None,
    dataset: dict[str, str | None],
    written: DocumentPaths | None,
    tasks: "Tasks | None",
) -> dict[str, Any]:
    """Return the measures of a model."""
    trusted = settings.trust_remote_code
    model, tokenizer = load_for_reading(name, settings.dtype, settings.device, trust_remote_code=trusted)
    find_paths = _path_finder(model, settings, written)
    memories = model.config.memories() if hasattr(model.config, "memories") else None
    measured = {
        "model": name,
        "model_type": model.config.model_type,
        "parameters": model.num_parameters(),
        "causal": not (memories is not None and memories.reads_ahead),
        "reads_blocks": find_paths is not None if fetches_blocks(model) else None,
        "perplexity": None,
        "tasks": {},
    }
    if documents is not None:
        joined = settings.retriever is None and settings.path_column is None
        lengths: dict[str, Any] = {"sequence_length": settings.sequence_length, "max_tokens": settings.max_tokens}
        rows = text_rows("text", documents, tokenizer, model.config, joined=joined, **lengths)
        if find_paths is not None:
            rows = dataclasses.replace(rows, paths=find_paths(documents))
        losses = row_losses(model, rows, batch_size=settings.batch_size)
        bits = losses.sums.sum().item() / math.log(2)
        measured["perplexity"] = {
            "perplexity": losses.perplexity,
            "bits_per_byte": bits / sum(rows.num_bytes) if rows.num_bytes else None,
            "tokens": rows.num_tokens,
            "tokens_sha256": rows.tokens_sha256,
            "sequence_length": int(rows.lengths.max()),
            "dataset": dataset,
        }
    if tasks is not None:
        measured["tasks"] = tasks.run(
            model,
            tokenizer,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            batch_size=settings.batch_size,
            find_paths=find_paths if settings.retriever is not None else None,
        )
    return measured


def _path_finder(
    model: PreTrainedModel, settings: EvaluationSettings, written: DocumentPaths | None
) -> PathFinder | None:
    """Return the function that finds the paths of a model's texts, by the retriever or from their column; None without paths."""
    if not fetches_blocks(model):
        return None
    retriever = open_retriever(model, settings.retriever)
    if retriever is not None:
        return retriever.paths
    if written is None:
        return None
    banks: Any = model.banks
    paths = torch.from_numpy(written.paths)
    for layout in banks.layouts.values():
        check_paths(paths, layout, f"column {settings.path_column!r} of the text")
    check_tree(banks, written.tree, "the text", "Assign the text by the tree of the model.")
    return lambda documents: paths
