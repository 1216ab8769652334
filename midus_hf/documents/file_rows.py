"""The rows of JSON lines and Parquet, each with its location in the file."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midus_hf.documents.document_error import DocumentError, first_line, import_datasets
from midus_hf.documents.file_text import codec_of, not_text, open_file
from midus_hf.documents.text_files import endings, find_files
from midus_hf.files.json_text import parse_json


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
    except DocumentError:
        raise
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
