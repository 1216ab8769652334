"""The options of a question about a model, and the models, texts and rows of tokens that they name."""

import dataclasses
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.model_names import check_dtype, check_model_name, check_sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from midus_hf.evaluation.text_rows import TextRows


class Request:
    """Options of a question, under the names that the command line has for them."""

    model: str
    models: list[str]
    text: list[str]
    base: str
    column: str
    batch_size: int
    retriever: str | None
    tasks: str
    data: str | None
    limit: int | None
    at_least: float | None
    prove: bool
    dtype: str
    device: str | None
    layer: int | None = None
    head: int | None = None

    def __init__(self, **options: Any):
        vars(self).update(options)

    def check(self) -> None:
        """Check what the command line did not, before anything large is imported."""
        check_dtype(self.dtype)
        named = {key: vars(self).get(key) for key in ("retriever", "data")}
        check_sources((key, name) for key, name in named.items() if name is not None)
        if "tasks" in vars(self) and not self.task_names:
            raise ValueError(f"tasks is {self.tasks!r}; expected names of tasks, separated by commas.")
        if (self.layer is None) != (self.head is None):
            raise ValueError(
                "layer and head name one head together; expected both or neither. Give the other as well."
            )
        if "text" in vars(self):
            assert self.documents
        if "base" in vars(self):
            self._check_base()

    @property
    def task_names(self) -> list[str]:
        """Names of the tasks."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    def load(self, name: str, label: str = "model") -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """Load a model and its tokenizer, as `midus_hf.saved_models.load_for_reading` does."""
        from midus_hf.saved_models import load_for_reading

        return load_for_reading(str(Path(name).expanduser()), self.dtype, self.device, label)

    @cached_property
    def loaded(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """The model, in eval mode, and its tokenizer."""
        return self.load(self.model)

    @cached_property
    def folder(self) -> Path:
        """The folder of the model, which is downloaded if it is on the Hub."""
        from huggingface_hub import snapshot_download

        path = Path(self.model).expanduser()
        return path if path.is_dir() else Path(snapshot_download(self.model))

    @cached_property
    def documents(self) -> dict[str, list[str]]:
        """Documents of each text, by the text's name. What was not read is printed on standard error."""
        from midus_hf.data.corpus import read_corpus

        paths: dict[str, str] = {}
        for text in self.text:
            name, equals, path = text.partition("=")
            if not equals or Path(text).exists():
                name, path = Path(text).absolute().name, text
            if not (name and path):
                raise ValueError(f"text is {text!r}; expected PATH or NAME=PATH, such as code=code.jsonl.")
            if name in paths:
                raise ValueError(f"text {name!r} is given twice; expected each name once.")
            paths[name] = path
        column = self.column
        return {name: read_corpus(path, key="text", text_column=column)[column][:] for name, path in paths.items()}

    @cached_property
    def text_rows(self) -> "list[TextRows]":
        """The texts as rows of tokens, with paths if there is a retriever."""
        from midus_hf.evaluation.fetching import fetches_blocks, open_retriever
        from midus_hf.evaluation.text_rows import text_rows

        model, tokenizer = self.loaded
        lengths = {name: vars(self)[name] for name in ("sequence_length", "max_tokens")}
        texts = [
            text_rows(name, documents, tokenizer, model.config, **lengths)
            for name, documents in self.documents.items()
        ]
        retriever = open_retriever(model, self.retriever)
        if retriever is not None:
            return [
                dataclasses.replace(text, paths=retriever.paths(self.documents[text.name]).cpu()) for text in texts
            ]
        if fetches_blocks(model):
            print(
                "texts fetch nothing from the model's bank; give --retriever with its tree of topics", file=sys.stderr
            )
        return texts

    def _check_base(self) -> None:
        """Check that `base` names a model, or that the model without added parts is its base."""
        if self.base != "self":
            check_model_name("base", self.base)
            return
        from midus_hf.files.outputs import has_config_entry
        from upscalers.checkpoint.base_checkpoint import read_config
        from upscalers.checkpoint.source import resolve_source
        from upscalers.record.provenance import resized_vocabulary
        from upscalers.runs.base_confirmation import keeps_base

        with resolve_source(self.model) as source:
            config = read_config(source.folder)
        resized = resized_vocabulary(config) if has_config_entry(config) else None
        if resized is not None:
            before, size = resized
            raise ValueError(
                f"base is 'self', but the vocabulary of {self.model!r} was resized from {before:,} to {size:,} tokens since "
                "it was upscaled; expected the base with this vocabulary. 'upscale strip' writes it: give its folder as base."
            )
        kept = keeps_base(self.model)
        if not kept:
            trained = "are not those that it was upscaled from: trained since, or cast"
            why = trained if kept is False else "are of no known base"
            raise ValueError(
                f"base is 'self', but the base's weights in {self.model!r} {why}; expected the base itself. Give its folder as base."
            )
