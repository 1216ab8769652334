"""The documents of text files, JSON lines and Parquet, and of folders of them, and the paths in their rows."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from midus_hf.config.fetched_blocks import TREE_COLUMN
from midus_hf.files.json_text import parse_json
from midus_hf.topics.text_files import (
    DocumentError,
    codec_of,
    endings,
    find_files,
    first_line,
    import_datasets,
    not_text,
    open_file,
    read_text,
)


def read_documents(path: str | Path, column: str = "text", encoding: str = "utf-8") -> list[str]:
    """Read all documents of a file or a folder.

    Args:
        path: A `.jsonl` or `.parquet` file, with a document per row; any other file, which is one document; or a
            folder. Of a folder and its subfolders, the `.txt`, `.md`, `.jsonl` and `.parquet` files are read in the
            order of their paths, without hidden ones. All but Parquet may be compressed, with `.gz` or `.zst` after the
            ending. Files ending in `.json.gz` and `.json.zst` count as JSON lines, as in published corpora.
        column: Column, or JSON key, that holds the text. Default: `"text"`.
        encoding: Encoding of plain text and JSON lines. Default: `"utf-8"`.

    Returns:
        The documents that are not blank; at least one.

    Raises:
        DocumentError: If the path does not exist or holds no document, or `texts_of` cannot read a file.
    """
    texts = (text for file in find_files(path) for _, _, text in texts_of(file, column, encoding))
    documents = [text for text in texts if text.strip()]
    if not documents:
        raise DocumentError(
            f"text {str(path)!r} is empty: it has no document with a visible character. Add text to it."
        )
    return documents


def texts_of(
    file: Path, column: str = "text", encoding: str = "utf-8"
) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """Yield each document of a file as its location in words, its row, which is None for plain text, and its text.

    Args:
        column: Column, or JSON key, that holds the text. Default: `"text"`.
        encoding: Encoding of plain text and JSON lines. Default: `"utf-8"`.

    Raises:
        DocumentError: If the file cannot be opened, is not text in this encoding, or is not the JSON, Parquet or
            compressed file that its name says; if a row has no text in the column; or if `datasets` is not installed,
            for Parquet and `.zst`.
    """
    rows = _rows_of(file, encoding)
    if rows is None:
        yield f"file {str(file)!r}", None, read_text(file, encoding)
        return
    for location, row in rows:
        if not isinstance(row, dict) or column not in row:
            description = f"only {', '.join(map(str, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
            raise DocumentError(
                f"{location} has no {column!r}, {description}; set column to the one that holds the text."
            )
        if not isinstance(row[column], str):
            raise DocumentError(f"{location} has a {type(row[column]).__name__} under {column!r}; expected text.")
        yield location, row, row[column]


def has_column(path: str | Path, column: str, encoding: str = "utf-8") -> bool:
    """Return whether any row of a file, or of a folder's files, has a value in a column. Plain text has no columns.

    Args:
        path: A file or a folder, as in `find_files`.
        encoding: Encoding of JSON lines. Default: `"utf-8"`.

    Raises:
        DocumentError: If a file cannot be read.
    """
    rows = (row for file in find_files(path) for _, row in _rows_of(file, encoding) or ())
    return any(isinstance(row, dict) and row.get(column) is not None for row in rows)


def document_rows(
    files: Iterable[Path], column: str = "text", encoding: str = "utf-8"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of documents that are not blank, each after its location in words.

    Args:
        files: Files, as from `find_files`.
        column: Column, or JSON key, that holds the text. Default: `"text"`.
        encoding: Encoding of JSON lines. Default: `"utf-8"`.

    Raises:
        DocumentError: If `texts_of` cannot read a file, or a file is plain text, which has no rows.
    """
    for file in files:
        for location, row, text in texts_of(file, column, encoding):
            if row is None:
                raise DocumentError(
                    f"{location} is plain text, which has no columns; expected JSON lines or Parquet, as midus cluster "
                    "assign writes."
                )
            if text.strip():
                yield location, row


def _rows_of(path: Path, encoding: str) -> Iterator[tuple[str, Any]] | None:
    """Return an iterator over the rows of JSON lines or Parquet, each after its location; None for plain text."""
    suffix, compression = endings(path)
    if suffix == ".parquet" and not compression:
        return _parquet_rows(path)
    if suffix == ".jsonl" or (suffix == ".json" and compression):
        return _json_line_rows(path, encoding)
    return None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    file = f"file {str(path)!r}"
    datasets = import_datasets(file)
    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"row {number} of {str(path)!r}", row
    except (OSError, ValueError, RuntimeError) as error:
        raise DocumentError(f"{file} is no readable Parquet: {first_line(error)}. Write it again.") from error


def _json_line_rows(path: Path, encoding: str) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with open_file(path) as stream, io.TextIOWrapper(stream, encoding=codec_of(encoding), newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    location = f"line {number} of {str(path)!r}"
                    try:
                        row = parse_json(line)
                    except ValueError as error:
                        raise DocumentError(
                            f"{location} is not JSON: {error}. Expected one object per line."
                        ) from error
                    yield location, row
    except UnicodeDecodeError as error:
        raise not_text(path, encoding, f"{error.reason} after line {number}") from error


@dataclass(frozen=True)
class DocumentPaths:
    """Paths of documents with the fingerprint of their tree.

    Args:
        paths: The node at each level, `[documents, p]`, int64. A row of -1 is the path of the generic memory.
        tree: Fingerprint of the tree; None if the documents do not name one.
    """

    paths: np.ndarray
    tree: str | None


def read_paths(rows: Iterable[tuple[str, Any]], column: str) -> DocumentPaths:
    """Read the paths of documents from a column of their rows, each of which follows its location, for error messages.

    Raises:
        DocumentError: If a row has no path, or a path of another length or another tree than the rows before.
    """
    paths: list[list[int]] = []
    tree: str | None = None
    for location, row in rows:
        path = row.get(column)
        if not _is_path(path) or (paths and len(path) != len(paths[0])):
            raise DocumentError(
                f"{location} has {path!r} under {column!r}; expected the document's node at each level of the tree, as midus "
                "cluster assign writes it, such as [3, 52, 840], or -1 at each level, the path of the generic memory."
            )
        tree_of_row = row.get(TREE_COLUMN)
        if paths and tree_of_row != tree:
            raise DocumentError(
                f"{location} has {_named(tree_of_row)} under {TREE_COLUMN!r}, and the rows before it have {_named(tree)}; expected "
                "paths of one tree. Assign all documents by the same tree."
            )
        tree = tree_of_row
        paths.append(path)
    return DocumentPaths(np.array(paths, dtype=np.int64).reshape(len(paths), -1), tree)


def _is_path(path: Any) -> bool:
    if not isinstance(path, list) or not path or any(type(node) is not int for node in path):
        return False
    return all(node >= 0 for node in path) or all(node == -1 for node in path)


def _named(tree: Any) -> str:
    return "nothing" if tree is None else f"{str(tree)[:16]}..."
