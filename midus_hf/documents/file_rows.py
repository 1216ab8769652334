"""The rows of JSON lines and Parquet, each with where it is."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midus_hf.documents.document_error import DocumentError, first_line, import_datasets
from midus_hf.documents.file_text import codec_of, not_text, open_file
from midus_hf.documents.text_files import endings, find_files
from midus_hf.files.json_text import parse_json


class RowPlace(str):
    """Where a row is, for messages.

    Args:
        words: That say so.
        file: That has it.
        line: Its line, or of Parquet its row, counted from 1.
    """

    file: Path
    line: int

    def __new__(cls, words: str, file: Path, line: int) -> "RowPlace":
        place = super().__new__(cls, words)
        place.file, place.line = file, line
        return place

    def __getnewargs__(self) -> tuple[str, Path, int]:  # type: ignore[override]  # a str says what pickle makes it of by words alone
        return str(self), self.file, self.line


def rows_of(path: Path, encoding: str = "utf-8") -> Iterator[tuple[RowPlace, Any]] | None:
    """The rows of a file of JSON lines or Parquet, each with where it is, for messages; None if it is plain text.

    Args:
        path: The file.
        encoding: Of JSON lines. Default: `"utf-8"`.

    Raises:
        DocumentError: When read, as `parquet_rows` and `json_line_rows`.
    """
    suffix, compression = endings(path)
    if suffix == ".parquet" and not compression:
        return parquet_rows(path)
    if suffix == ".jsonl" or (suffix == ".json" and compression):
        return json_line_rows(path, encoding)
    return None


def text_of_row(row: Any, column: str, place: str) -> str:
    """The text of one row.

    Args:
        row: A mapping from columns to values, if all is well.
        column: The column that holds the text.
        place: Where the row is, for messages.

    Raises:
        DocumentError: If the row has no such column, or no text in it.
    """
    if not isinstance(row, dict) or column not in row:
        found = f"only {', '.join(map(str, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise DocumentError(f"{place} has no {column!r}, {found}; set column to the one that holds the text.")
    if not isinstance(row[column], str):
        raise DocumentError(f"{place} has a {type(row[column]).__name__} under {column!r}; expected text.")
    return row[column]


def value_of_row(row: Any, column: str) -> Any:
    """Return what a row has in a column, of its own or within its `metadata`; None where it has nothing.

    Pipelines of datatrove keep what they find out about a document in a mapping of that name, and write it as one column.

    Args:
        row: A mapping from columns to values, if all is well.
        column: Its name.
    """
    if not isinstance(row, dict):
        return None
    metadata = row.get("metadata")
    return metadata.get(column) if row.get(column) is None and isinstance(metadata, dict) else row.get(column)


def has_column(path: str | Path, column: str, encoding: str = "utf-8") -> bool:
    """Whether a row of a file, or of the files of a folder, has a column; plain text has none.

    Args:
        path: As in `find_files`.
        column: Its name.
        encoding: Of JSON lines. Default: `"utf-8"`.

    Raises:
        DocumentError: If a file cannot be read.
    """
    return any(
        value_of_row(row, column) is not None for file in find_files(path) for _, row in rows_of(file, encoding) or ()
    )


def parquet_rows(path: Path) -> Iterator[tuple[RowPlace, Any]]:
    """The rows of a Parquet file, each with where it is, for messages.

    Args:
        path: The file.

    Raises:
        DocumentError: If it cannot be read, or `datasets` is not installed.
    """
    place = f"file {str(path)!r}"
    datasets = import_datasets(place)
    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield RowPlace(f"row {number} of {str(path)!r}", path, number), row
    except DocumentError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise DocumentError(f"{place} is no readable Parquet: {first_line(error)}. Write it again.") from error


def json_line_rows(path: Path, encoding: str) -> Iterator[tuple[RowPlace, Any]]:
    """The rows of a file of JSON lines, each with where it is, for messages.

    Args:
        path: The file.
        encoding: Of its text.

    Raises:
        DocumentError: If it cannot be read, or a line is not JSON.
    """
    number = 0
    try:
        with open_file(path) as stream, io.TextIOWrapper(stream, encoding=codec_of(encoding), newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = RowPlace(f"line {number} of {str(path)!r}", path, number)
                    yield place, _parse(line, place)
    except UnicodeDecodeError as error:
        raise not_text(path, encoding, f"{error.reason} after line {number}") from error


def _parse(line: str, place: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise DocumentError(f"{place} is not JSON: {error}. Expected one object per line.") from error
