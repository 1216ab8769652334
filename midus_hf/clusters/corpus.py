"""The documents of a corpus, with gold labels if it has any, and their windows of tokens."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from midus_hf.config.fetched_blocks import TREE_COLUMN
from midus_hf.documents import DocumentError, find_files, first_line, iterate_documents, rows_of, text_of_row
from midus_hf.saved_models import load_tokenizer

_DOCUMENTS_A_BATCH = 64
# Columns that the rows of assigned documents have beside the path.
_OWN_COLUMNS = ("document", "windows", TREE_COLUMN)


@dataclass(frozen=True)
class Corpus:
    """Location and format of the documents of a corpus.

    Args:
        path: A file or a folder, as in `midus_hf.documents.read_documents`.
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
        source: File of rows that contains the document. Default: None; the document is a whole file, or its source is
            unknown.
        row: All columns of the document's row. Default: None; the document is a whole file, or rows are not kept.
    """

    number: int
    text: str
    label: str | None = None
    source: str | None = None
    row: dict[str, Any] | None = None


@dataclass(frozen=True)
class Window:
    """A window of a document: consecutive tokens.

    Args:
        document: The document that contains the window.
        number: Index among the windows of the document, from 0.
        text: The window's text.
    """

    document: Document
    number: int
    text: str


def read_corpus(corpus: Corpus) -> Iterator[Document]:
    """Read the documents of a corpus one after the other, without the blank ones.

    Raises:
        DocumentError: If `find_files` or `iterate_documents` cannot read the corpus, labels are wanted from a file
            without columns, or a row lacks a label.
    """
    documents = (
        (text, label, source)
        for file in find_files(corpus.path)
        for source in [None if rows_of(file, corpus.encoding) is None else str(file)]
        for text, label in _read_file(file, corpus)
        if text.strip()
    )
    return (Document(number, text, label, source) for number, (text, label, source) in enumerate(documents))


def read_rows(corpus: Corpus) -> Iterator[Document]:
    """Read the documents that `read_corpus` reads, with their rows and without labels.

    Raises:
        DocumentError: If the corpus cannot be read, as in `read_corpus`, or a row has no `memory_ids` but a column with
            a name that `document_paths` writes: the column then does not come from an earlier assignment.
    """
    documents = (
        (text, row) for file in find_files(corpus.path) for text, row in _rows_of_file(file, corpus) if text.strip()
    )
    return (Document(number, text, row=row) for number, (text, row) in enumerate(documents))


def _rows_of_file(path: Path, corpus: Corpus) -> Iterator[tuple[str, dict[str, Any] | None]]:
    rows = rows_of(path, corpus.encoding)
    if rows is None:
        yield from ((text, None) for text in iterate_documents([path], corpus.column, corpus.encoding))
        return
    for location, row in rows:
        text = text_of_row(row, corpus.column, location)
        reserved = [column for column in _OWN_COLUMNS if column in row]
        if reserved and "memory_ids" not in row:
            raise DocumentError(
                f"{location} has a column {reserved[0]!r}, which is written beside the paths of documents; expected columns of other "
                "names, or the columns of an earlier assignment. Rename the column."
            )
        yield text, row


def cut_windows(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, window_tokens: int
) -> Iterator[Window]:
    """Cut documents into consecutive windows that do not overlap.

    The windows of a document add up to its text, except that blank windows are left out. The last window may be
    shorter. Special tokens are not counted.

    Args:
        documents: Documents, in any order.
        tokenizer: Tokenizer from `load_fast_tokenizer`.
        window_tokens: Tokens per window.
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
    """Load a tokenizer that can map its tokens to characters of the text.

    Args:
        name: Folder or hub id.

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


def _read_file(path: Path, corpus: Corpus) -> Iterator[tuple[str, str | None]]:
    if corpus.label_column is None:
        return ((text, None) for text in iterate_documents([path], corpus.column, corpus.encoding))
    rows = rows_of(path, corpus.encoding)
    if rows is None:
        raise DocumentError(
            f"file {str(path)!r} is plain text, which has no column {corpus.label_column!r} of labels; expected JSON lines or "
            "Parquet. Leave --label-column out."
        )
    return (
        (text_of_row(row, corpus.column, location), _label(row, corpus.label_column, location))
        for location, row in rows
    )


def _label(row: dict[str, Any], column: str, location: str) -> str:
    label = row.get(column)
    if not isinstance(label, str | int):
        description = "nothing" if label is None else f"a {type(label).__name__}"
        raise DocumentError(
            f"{location} has {description} under {column!r}; expected a label, a string or a whole number."
        )
    return str(label)
