"""The documents of a corpus, with their gold labels where it has any, cut into windows of tokens."""

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
_OWN_COLUMNS = ("document", "windows", TREE_COLUMN)
"""What the rows of assigned documents have beside the path."""


@dataclass(frozen=True)
class Corpus:
    """Where documents are.

    Args:
        path: A file or a folder, as in `midus_hf.documents.read_documents`.
        column: The column, or JSON key, that holds the text. Default: `"text"`.
        label_column: The one that holds gold labels. Default: None, there are none.
        encoding: Of plain text and JSON lines. Default: `"utf-8"`.
    """

    path: str
    column: str = "text"
    label_column: str | None = None
    encoding: str = "utf-8"


@dataclass(frozen=True)
class Document:
    """A text.

    Args:
        number: Its place among the documents that hold anything but white space, from 0.
        text: All of it.
        label: Its gold label; None where the corpus has none.
        source: The file of rows that it is from; None if it is a file of its own, or nobody says.
        row: All columns of its row; None if it is a file of its own, or nobody keeps rows.
    """

    number: int
    text: str
    label: str | None = None
    source: str | None = None
    row: dict[str, Any] | None = None


@dataclass(frozen=True)
class Window:
    """A stretch of a document.

    Args:
        document: Where it is from.
        number: Its place among the windows of the document, from 0.
        text: Its characters.
    """

    document: Document
    number: int
    text: str


def read_corpus(corpus: Corpus) -> Iterator[Document]:
    """Read documents one after the other; those that hold nothing but white space are left out.

    Args:
        corpus: Where they are.

    Raises:
        DocumentError: As `find_files` and `iterate_documents`; or if labels are wanted of a file without columns, or of a
            row without a label.
    """
    found = (
        (text, label, source)
        for file in find_files(corpus.path)
        for source in [None if rows_of(file, corpus.encoding) is None else str(file)]
        for text, label in _read_file(file, corpus)
        if text.strip()
    )
    return (Document(number, text, label, source) for number, (text, label, source) in enumerate(found))


def read_rows(corpus: Corpus) -> Iterator[Document]:
    """Read the documents that `read_corpus` reads, with their rows and without labels.

    Args:
        corpus: Where they are.

    Raises:
        DocumentError: As `read_corpus`; or if a row has a column that `document_paths` adds, and no path: it is somebody else's.
    """
    found = (
        (text, row) for file in find_files(corpus.path) for text, row in _rows_of_file(file, corpus) if text.strip()
    )
    return (Document(number, text, row=row) for number, (text, row) in enumerate(found))


def _rows_of_file(path: Path, corpus: Corpus) -> Iterator[tuple[str, dict[str, Any] | None]]:
    rows = rows_of(path, corpus.encoding)
    if rows is None:
        yield from ((text, None) for text in iterate_documents([path], corpus.column, corpus.encoding))
        return
    for place, row in rows:
        text = text_of_row(row, corpus.column, place)
        taken = [column for column in _OWN_COLUMNS if column in row]
        if taken and "memory_ids" not in row:
            raise DocumentError(
                f"{place} has a column {taken[0]!r}, which paths of documents are written with; expected columns of other names, or "
                "those of an earlier assignment. Rename it."
            )
        yield text, row


def cut_windows(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, window_tokens: int
) -> Iterator[Window]:
    """Cut documents into windows that do not overlap; together, the windows of a document are its text.

    The last window of a document has what is left. Windows that hold nothing but white space are left out; special tokens are
    not counted.

    Args:
        documents: In any order.
        tokenizer: From `load_fast_tokenizer`.
        window_tokens: Tokens of a window.
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
            # Tokens may share a character: a window begins where its first token does, and nothing is left out between.
            begins = [0, *(begin for begin, _ in offsets[window_tokens::window_tokens])]
            for number, (begin, end) in enumerate(zip(begins, [*begins[1:], None], strict=True)):
                if (text := document.text[begin:end]).strip():
                    yield Window(document, number, text)


def load_fast_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer that knows which characters its tokens are from.

    Args:
        name: Folder or hub id.

    Raises:
        ValueError: If it cannot be loaded, or does not know.
    """
    try:
        tokenizer = load_tokenizer(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"tokenizer is {name!r}, which cannot be loaded: {first_line(error)} Expected a folder or hub id of one."
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer is {name!r}, which does not know the places of its tokens in a text; expected a fast one, with a "
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
    return ((text_of_row(row, corpus.column, place), _label(row, corpus.label_column, place)) for place, row in rows)


def _label(row: dict[str, Any], column: str, place: str) -> str:
    label = row.get(column)
    if not isinstance(label, str | int):
        found = "nothing" if label is None else f"a {type(label).__name__}"
        raise DocumentError(f"{place} has {found} under {column!r}; expected a label, a string or a whole number.")
    return str(label)
