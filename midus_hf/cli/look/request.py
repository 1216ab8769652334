"""The models, texts and rows of tokens of a question about a model."""

import dataclasses
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from midus_hf.config.errors import RequestError
from midus_hf.sources.names import check_dtype, check_sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from midus_hf.evaluation.text_rows import TextRows


@dataclass
class Model:
    """A model by its name, loaded on first use. An unknown dtype is refused before torch is imported."""

    name: str
    dtype: str
    device: str | None

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def load(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """Load the model, as `midus_hf.models.saved_models.load_for_reading` does, and its tokenizer."""
        from midus_hf.models.saved_models import load_for_reading

        return load_for_reading(str(Path(self.name).expanduser()), self.dtype, self.device)

    @cached_property
    def loaded(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """The model, in eval mode, and its tokenizer, kept."""
        return self.load()

    @cached_property
    def folder(self) -> Path:
        """The folder of the model, which is downloaded if it is on the Hub."""
        from huggingface_hub import snapshot_download

        path = Path(self.name).expanduser()
        return path if path.is_dir() else Path(snapshot_download(self.name))


@dataclass
class Texts:
    """A model and the texts that it reads; the documents are read at once, before torch is imported."""

    model: Model
    text: list[str]
    column: str
    sequence_length: int | None
    max_tokens: int | None
    batch_size: int
    retriever: str | None

    def __post_init__(self) -> None:
        check_sources([] if self.retriever is None else [("retriever", self.retriever)])
        self.documents = read_documents(self.text, self.column)

    @cached_property
    def rows(self) -> "list[TextRows]":
        """The texts as rows of tokens, with paths if there is a retriever."""
        from midus_hf.evaluation.fetching import fetches_blocks, open_retriever
        from midus_hf.evaluation.text_rows import text_rows

        model, tokenizer = self.model.loaded
        read = partial(text_rows, sequence_length=self.sequence_length, max_tokens=self.max_tokens)
        texts = [read(name, documents, tokenizer, model.config) for name, documents in self.documents.items()]
        retriever = open_retriever(model, self.retriever)
        if retriever is not None:
            paths = {name: retriever.paths(documents).cpu() for name, documents in self.documents.items()}
            return [dataclasses.replace(text, paths=paths[text.name]) for text in texts]
        if fetches_blocks(model):
            print(
                "texts fetch nothing from the model's bank; give --retriever with its tree of topics", file=sys.stderr
            )
        return texts


def read_documents(text: list[str], column: str) -> dict[str, list[str]]:
    """Return the documents of each text, by the text's name. Files that were not read are listed on standard error."""
    from midus_hf.data.corpus import read_corpus

    paths: dict[str, str] = {}
    for named in text:
        name, equals, path = named.partition("=")
        if not equals or Path(named).exists():
            name, path = Path(named).absolute().name, named
        if not (name and path):
            raise RequestError(f"text is {named!r}; expected PATH or NAME=PATH, such as code=code.jsonl.")
        if name in paths:
            raise RequestError(f"text {name!r} is given twice; expected each name once.")
        paths[name] = path
    return {name: read_corpus(path, key="text", text_column=column)[column][:] for name, path in paths.items()}


def names_of_tasks(tasks: str) -> list[str]:
    """Return names that commas separate."""
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise RequestError(f"tasks is {tasks!r}; expected names of tasks, separated by commas.")
    return names
