"""Evaluation of checkpoints with the same settings. Torch is imported when a model is measured."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from midus_hf.config.errors import RequestError
from midus_hf.memories.registry import are_causal
from midus_hf.sources.names import check_dtype, usable_device

if TYPE_CHECKING:
    from midus_hf.data.corpus import DocumentPaths
    from midus_hf.evaluation.fetching import PathFinder
    from midus_hf.evaluation.harness import Tasks

# Settings that need a text, and those that need tasks.
_OF_TEXT = ("column", "sequence_length", "max_tokens", "path_column")
_OF_TASKS = ("data", "include_path", "num_fewshot", "limit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation: what is measured, and how. Paths are relative to the current folder."""

    text: str | None = None
    column: str = "text"
    sequence_length: int | None = None
    max_tokens: int | None = None
    retriever: str | None = None
    path_column: str | None = None
    tasks: list[str] | None = None
    data: str | None = None
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 4
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Refuse settings of what is not measured, and numbers that are too small."""
        if self.text is None and not self.tasks:
            raise RequestError("there is nothing to measure; give a text, tasks, or both.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            of_text = field.name in _OF_TEXT
            of_tasks = field.name in _OF_TASKS
            if value != field.default and ((of_text and not self.text) or (of_tasks and not self.tasks)):
                missing = "text to measure" if of_text else "task to run"
                raise RequestError(f"{field.name} is {value!r}, but there is no {missing}; give one, or leave it out.")
        if self.path_column is not None and self.retriever is not None:
            raise RequestError(
                f"path_column is {self.path_column!r}, but a retriever is given; expected one of them. Leave one out."
            )
        check_dtype(self.dtype)
        least_of = {"limit": 1, "batch_size": 1, "sequence_length": 1, "max_tokens": 1, "num_fewshot": 0}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"{name} is {value}; expected at least {least}.")


def evaluate(models: list[str], settings: EvaluationSettings) -> dict[str, Any]:
    """Evaluate models and return a report; checks that need no model come first."""
    from midus_hf.data.corpus import read_corpus, read_paths
    from midus_hf.topics.tree import ClusterTree

    usable_device(settings.device)
    if settings.retriever is not None:
        ClusterTree.load(settings.retriever)  # a tree that cannot be read is refused, even if no model fetches blocks
    documents = tasks = written = None
    if settings.text is not None:
        texts = read_corpus(settings.text, key="text", text_column=settings.column)
        documents = texts[settings.column][:]
        if settings.path_column is not None:
            written = read_paths(texts, settings.path_column, f"text {settings.text!r}")
    if settings.tasks:
        from midus_hf.evaluation.harness import Tasks

        tasks = Tasks(settings.tasks, data=settings.data, include_path=settings.include_path)
    measured = [_measure(name, settings, documents, written, tasks) for name in models]
    return {"models": measured, "settings": dataclasses.asdict(settings)}


def _measure(
    name: str,
    settings: EvaluationSettings,
    documents: list[str] | None,
    written: "DocumentPaths | None",
    tasks: "Tasks | None",
) -> dict[str, Any]:
    """Load a model and return its perplexity on documents and its results of tasks."""
    from midus_hf.evaluation.fetching import fetches_blocks
    from midus_hf.evaluation.text_rows import row_losses, text_rows
    from midus_hf.memories.packs.kept_readings import keep_readings
    from midus_hf.models.saved_models import load_for_reading

    trusted = settings.trust_remote_code
    model, tokenizer = load_for_reading(name, settings.dtype, settings.device, trust_remote_code=trusted)
    find_paths = _path_finder(model, settings, written)
    memories = model.config.memories() if hasattr(model.config, "memories") else None
    measured = {
        "model": name,
        "model_type": model.config.model_type,
        "parameters": model.num_parameters(),
        "causal": memories is None or are_causal(memories),
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
        with keep_readings(model, check_numbers=False):
            losses = row_losses(model, rows, batch_size=settings.batch_size)
        bits = losses.sums.sum().item() / math.log(2)
        measured["perplexity"] = {
            "perplexity": losses.perplexity,
            "bits_per_byte": bits / sum(rows.num_bytes) if rows.num_bytes else None,
            "tokens": rows.num_tokens,
            "tokens_sha256": rows.tokens_sha256,
            "sequence_length": int(rows.lengths.max()),
        }
    if tasks is not None:
        with keep_readings(model, check_numbers=False):
            measured["tasks"] = tasks.run(
                model,
                tokenizer,
                num_fewshot=settings.num_fewshot,
                limit=settings.limit,
                batch_size=settings.batch_size,
                find_paths=find_paths if settings.retriever is not None else None,
            )
    return measured


def _path_finder(model: Any, settings: EvaluationSettings, written: "DocumentPaths | None") -> "PathFinder | None":
    """Return the function that finds paths of texts, by the retriever or a column; None without paths."""
    import torch

    from midus_hf.evaluation.fetching import fetches_blocks, open_retriever
    from midus_hf.memories.hierarchical.bank import check_paths
    from midus_hf.memories.hierarchical.fetching import check_tree

    if not fetches_blocks(model):
        return None
    retriever = open_retriever(model, settings.retriever)
    if retriever is not None:
        return retriever.paths
    if written is None:
        return None
    paths = torch.from_numpy(written.paths)
    for layout in model.banks.layouts.values():
        check_paths(paths, layout, f"column {settings.path_column!r} of the text")
    check_tree(model.banks, written.tree, "the text", "Assign the text by the tree of the model.")
    return lambda documents: paths
