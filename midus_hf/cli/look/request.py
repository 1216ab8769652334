"""The options of each question about a model, and the models, texts and rows of tokens that the options name."""

import dataclasses
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.model_names import check_model_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from midus_hf.evaluation.text_rows import TextRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Options of every question."""

    dtype: str = "auto"
    device: str | None = None

    def check(self) -> None:
        """Check what the command line did not, before a model is loaded: nothing, for options that every question has."""

    def load(self, name: str, label: str = "model") -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """Load a model and its tokenizer, as `midus_hf.saved_models.load_for_reading` does."""
        from midus_hf.saved_models import load_for_reading

        return load_for_reading(str(Path(name).expanduser()), self.dtype, self.device, label)


def named_paths(texts: list[str]) -> dict[str, str]:
    """Return the paths of texts by name, from `PATH` and `NAME=PATH`."""
    paths: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = Path(text).absolute().name, text
        if not (name and path):
            raise ValueError(f"text is {text!r}; expected PATH or NAME=PATH, such as code=code.jsonl.")
        if name in paths:
            raise ValueError(f"text {name!r} is given twice; expected each name once.")
        paths[name] = path
    return paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsRequest(ModelRequest):
    """Options of the question about heads."""

    models: list[str]
    tasks: str
    data: str | None = None
    limit: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentsRequest(ModelRequest):
    """Options of questions about texts."""

    model: str
    text: list[str]
    column: str = "text"

    @cached_property
    def documents(self) -> dict[str, list[str]]:
        """Documents of each text, by the text's name. What was not read is printed on standard error."""
        from midus_hf.topics.corpus import read_corpus

        paths, column = named_paths(self.text), self.column
        return {name: read_corpus(path, key="text", text_column=column)[column][:] for name, path in paths.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRequest(DocumentsRequest):
    """Options of questions about what a model does with texts."""

    sequence_length: int | None = None
    max_tokens: int | None = None
    batch_size: int = 4
    retriever: str | None = None

    def check(self) -> None:
        """Read the texts, before anything large is imported."""
        assert self.documents is not None

    @cached_property
    def loaded(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """The model, in eval mode, and its tokenizer."""
        return self.load(self.model)

    @cached_property
    def text_rows(self) -> "list[TextRows]":
        """The texts as rows of tokens, with paths if there is a retriever."""
        from midus_hf.evaluation.fetching import fetches_blocks, open_retriever
        from midus_hf.evaluation.text_rows import text_rows

        model, tokenizer = self.loaded
        lengths: dict[str, Any] = {"sequence_length": self.sequence_length, "max_tokens": self.max_tokens}
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TouchedRequest(DocumentsRequest):
    """Options of the question where texts read a memory of known n-grams."""

    prove: bool = False

    @cached_property
    def folder(self) -> Path:
        """The folder of the model, which is downloaded if it is on the Hub."""
        from huggingface_hub import snapshot_download

        path = Path(self.model).expanduser()
        return path if path.is_dir() else Path(snapshot_download(self.model))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriftRequest(TextRequest):
    """Options of questions that compare the model with its base."""

    base: str = "self"

    def check(self) -> None:
        """Check what `TextRequest.check` checks, and that `base` names a model, or the model without added parts is its base."""
        super().check()
        if self.base != "self":
            check_model_name("base", self.base)
            return
        from midus_hf.files.outputs import has_config_entry
        from upscalers.checkpoint.base_model import read_config
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthRequest(TextRequest):
    """Options of the question about what heads read of the depth."""

    layer: int | None = None
    head: int | None = None

    def check(self) -> None:
        """Check what `TextRequest.check` checks, and that layer and head name one head together."""
        if (self.layer is None) != (self.head is None):
            raise ValueError(
                "layer and head name one head together; expected both or neither. Give the other as well."
            )
        super().check()
