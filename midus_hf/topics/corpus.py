"""The documents of a corpus, with gold labels if it has any, and their windows of tokens."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from midus_hf.saved_models import load_tokenizer
from midus_hf.topics.documents import texts_of
from midus_hf.topics.text_files import DocumentError, find_files, first_line

_DOCUMENTS_A_BATCH = 64


@dataclass(frozen=True)
class Corpus:
    """Location and format of the documents of a corpus.

    Args:
        path: A file or a folder, as in `midus_hf.topics.documents.read_documents`.
        column: Column, or JSON key, that holds the text. Default: `"text"`.
        label_column: Column, or JSON key, that holds gold labels. Default: None; there are no labels.
        encoding: Encoding of plain text and JSON lines. Default: `"utf-8"`.
    """

    path: str
    column: str = "text"
    label_column: str | None = None
    encoding: str = "utf-8"


@dataclass(frozen=True)
class Document:
    """A document of a corpus.

    Args:
        number: Index among the documents that are not blank, from 0.
        text: The whole text.
        label: Gold label. Default: None; the corpus has no labels.
        row: All columns of the document's row. Default: None; the document is a whole file.
        file: Name of the file that contains the document, below the corpus. Default: None; the corpus is no folder.
        location: Location of the document in words, for error messages. Default: empty.
    """

    number: int
    text: str
    label: str | None = None
    row: dict[str, Any] | None = None
    file: str | None = None
    location: str = ""


@dataclass(frozen=True)
class Window:
    """A window of a document: consecutive tokens, as text. `number` is its index among the windows of the document."""

    document: Document
    number: int
    text: str


def read_corpus(corpus: Corpus) -> Iterator[Document]:
    """Yield the documents of a corpus one after the other, without the blank ones.

    Raises:
        DocumentError: If the corpus cannot be read, labels are wanted from a file without columns, or a row lacks a label.
    """
    numbers, folder = itertools.count(), Path(corpus.path).expanduser()
    for file in find_files(corpus.path):
        name = file.relative_to(folder).as_posix() if folder.is_dir() else None
        for location, row, text in texts_of(file, corpus.column, corpus.encoding):
            label = None if corpus.label_column is None else _label(location, row, corpus.label_column)
            if text.strip():
                yield Document(next(numbers), text, label, row, name, location)


def _label(location: str, row: dict[str, Any] | None, column: str) -> str:
    if row is None:
        raise DocumentError(
            f"{location} is plain text, which has no column {column!r} of labels; expected JSON lines or Parquet. Leave "
            "--label-column out."
        )
    label = row.get(column)
    if not isinstance(label, str | int):
        description = "nothing" if label is None else f"a {type(label).__name__}"
        raise DocumentError(
            f"{location} has {description} under {column!r}; expected a label, a string or a whole number."
        )
    return str(label)


def cut_windows(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, window_tokens: int
) -> Iterator[Window]:
    """Cut documents into consecutive windows of `window_tokens` tokens that do not overlap; the last one may be shorter.

    The windows of a document add up to its text, except that blank windows are left out. Special tokens are not counted.
    """
    remaining = iter(documents)
    while batch := list(itertools.islice(remaining, _DOCUMENTS_A_BATCH)):
        encoded = tokenizer(
            [document.text for document in batch],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        for document, offsets in zip(batch, encoded["offset_mapping"], strict=True):
            # Tokens may share a character. A window begins with its first token and ends where the next window begins, so
            # no character is lost between two windows.
            begins = [0, *(begin for begin, _ in offsets[window_tokens::window_tokens])]
            for number, (begin, end) in enumerate(zip(begins, [*begins[1:], None], strict=True)):
                if (text := document.text[begin:end]).strip():
                    yield Window(document, number, text)


def load_fast_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub that can map its tokens to characters of the text.

    Raises:
        ValueError: If the tokenizer cannot be loaded, or cannot map its tokens.
    """
    try:
        tokenizer = load_tokenizer(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"tokenizer is {name!r}, which cannot be loaded: {first_line(error)} Expected the folder or hub id of a tokenizer."
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer is {name!r}, which does not know the positions of its tokens in a text; expected a fast one, with a "
            "tokenizer.json."
        )
    return tokenizer
