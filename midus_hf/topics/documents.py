"""The documents of text files, JSON lines and Parquet, and of folders of them, and the rows with their locations."""

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


class RowPlace(str):
    """Location of a row, as a string for error messages.

    Args:
        description: The location as a phrase, such as "line 3 of 'corpus.jsonl'".
        file: File that contains the row.
        line: Line of the row, or for Parquet its number, counted from 1.
    """

    file: Path
    line: int

    def __new__(cls, description: str, file: Path, line: int) -> "RowPlace":
        location = super().__new__(cls, description)
        location.file, location.line = file, line
        return location

    def __getnewargs__(self) -> tuple[str, Path, int]:  # type: ignore[override]  # `str` declares that pickle passes the text only
        return str(self), self.file, self.line


def rows_of(path: Path, encoding: str = "utf-8") -> Iterator[tuple[RowPlace, Any]] | None:
    """Return an iterator over the rows of JSON lines or Parquet, each after its location; None for plain text.

    Args:
        encoding: Encoding of JSON lines. Default: `"utf-8"`.

    Raises:
        DocumentError: During iteration, if `parquet_rows` or `json_line_rows` cannot read the file.
    """
    suffix, compression = endings(path)
    if suffix == ".parquet" and not compression:
        return parquet_rows(path)
    if suffix == ".jsonl" or (suffix == ".json" and compression):
        return json_line_rows(path, encoding)
    return None


def text_of_row(row: Any, column: str, location: str) -> str:
    """Return the text of one row.

    Args:
        row: Mapping from columns to values. Anything else is an error.
        column: Column that holds the text.
        location: Location of the row, for error messages.

    Raises:
        DocumentError: If the row lacks the column, or has no text in it.
    """
    if not isinstance(row, dict) or column not in row:
        description = f"only {', '.join(map(str, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise DocumentError(f"{location} has no {column!r}, {description}; set column to the one that holds the text.")
    if not isinstance(row[column], str):
        raise DocumentError(f"{location} has a {type(row[column]).__name__} under {column!r}; expected text.")
    return row[column]


def value_of_row(row: Any, column: str) -> Any:
    """Return the value of a column in a row or, failing that, in the row's `metadata`; None if neither has a value.

    Pipelines of datatrove keep their results about a document in a mapping, which they write as a column named
    `metadata`.

    Args:
        row: Mapping from columns to values. Anything else has no value.
    """
    if not isinstance(row, dict):
        return None
    metadata = row.get("metadata")
    return metadata.get(column) if row.get(column) is None and isinstance(metadata, dict) else row.get(column)


def has_column(path: str | Path, column: str, encoding: str = "utf-8") -> bool:
    """Return whether any row of a file, or of a folder's files, has a value in a column. Plain text has no columns.

    Args:
        path: A file or a folder, as in `find_files`.
        encoding: Encoding of JSON lines. Default: `"utf-8"`.

    Raises:
        DocumentError: If a file cannot be read.
    """
    return any(
        value_of_row(row, column) is not None for file in find_files(path) for _, row in rows_of(file, encoding) or ()
    )


def parquet_rows(path: Path) -> Iterator[tuple[RowPlace, Any]]:
    """Yield the rows of a Parquet file, each after its location.

    Raises:
        DocumentError: If the file cannot be read, or `datasets` is not installed.
    """
    file = f"file {str(path)!r}"
    datasets = import_datasets(file)
    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield RowPlace(f"row {number} of {str(path)!r}", path, number), row
    except (OSError, ValueError, RuntimeError) as error:
        raise DocumentError(f"{file} is no readable Parquet: {first_line(error)}. Write it again.") from error


def json_line_rows(path: Path, encoding: str) -> Iterator[tuple[RowPlace, Any]]:
    """Yield the rows of a file of JSON lines, each after its location.

    Raises:
        DocumentError: If the file cannot be read, or a line is not JSON.
    """
    number = 0
    try:
        with open_file(path) as stream, io.TextIOWrapper(stream, encoding=codec_of(encoding), newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    location = RowPlace(f"line {number} of {str(path)!r}", path, number)
                    yield location, _parse(line, location)
    except UnicodeDecodeError as error:
        raise not_text(path, encoding, f"{error.reason} after line {number}") from error


def _parse(line: str, location: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise DocumentError(f"{location} is not JSON: {error}. Expected one object per line.") from error


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
        DocumentError: If the path does not exist or holds no document, or `iterate_documents` cannot read a file.
    """
    documents = list(iterate_documents(find_files(path), column, encoding))
    if not documents:
        raise DocumentError(
            f"text {str(path)!r} is empty: it has no document with a visible character. Add text to it."
        )
    return documents


def iterate_documents(files: Iterable[Path], column: str = "text", encoding: str = "utf-8") -> Iterator[str]:
    """Yield the documents of files one after the other, without blank documents.

    Args:
        files: Files, as from `find_files`.
        column: Column, or JSON key, that holds the text. Default: `"text"`.
        encoding: Encoding of plain text and JSON lines. Default: `"utf-8"`.

    Raises:
        DocumentError: If a file cannot be opened, is not text in this encoding, or is not the JSON, Parquet or
            compressed file that its name says; if a row has no text in the column; or if `datasets` is not installed,
            for Parquet and `.zst`.
    """
    return (document for file in files for document in _read_file(file, column, encoding) if document.strip())


def document_rows(
    files: Iterable[Path], column: str = "text", encoding: str = "utf-8"
) -> Iterator[tuple[RowPlace, Any]]:
    """Yield the rows of the documents that `iterate_documents` yields, each after its location.

    Args:
        files: Files, as from `find_files`.
        column: Column, or JSON key, that holds the text. Default: `"text"`.
        encoding: Encoding of JSON lines. Default: `"utf-8"`.

    Raises:
        DocumentError: If `iterate_documents` cannot read a file, or a file is plain text, which has no rows.
    """
    for file in files:
        rows = rows_of(file, encoding)
        if rows is None:
            raise DocumentError(
                f"file {str(file)!r} is plain text, which has no columns; expected JSON lines or Parquet, as midus cluster "
                "assign writes."
            )
        yield from (row for row in rows if text_of_row(row[1], column, row[0]).strip())


def _read_file(path: Path, column: str, encoding: str) -> Iterator[str]:
    rows = rows_of(path, encoding)
    if rows is None:
        return iter([read_text(path, encoding)])
    return (text_of_row(row, column, location) for location, row in rows)


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
        path = value_of_row(row, column)
        if not _is_path(path) or (paths and len(path) != len(paths[0])):
            raise DocumentError(
                f"{location} has {path!r} under {column!r}; expected the document's node at each level of the tree, as midus "
                "cluster assign writes it, such as [3, 52, 840], or -1 at each level, the path of the generic memory."
            )
        tree_of_row = value_of_row(row, TREE_COLUMN)
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
