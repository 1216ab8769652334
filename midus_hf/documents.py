"""Read documents from text files, JSON lines, Parquet, and folders of them, compressed or not."""

import codecs
import collections
import contextlib
import gzip
import importlib.util
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

FOLDER_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
"""Endings of the files that are read from a folder; all but the last also with one of `COMPRESSIONS` after them."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""What an ending says of how a file is compressed."""

_ENDINGS_NAMED = 5


class DocumentError(ValueError):
    """Text that cannot be read, or that there is too little of."""


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


def read_documents(path: str | Path, column: str = "text", encoding: str = "utf-8") -> list[str]:
    """Read all documents of a file or a folder.

    Args:
        path: A `.jsonl` or `.parquet` file, a document per row; any other file, which is one document; or a folder,
            whose `.txt`, `.md`, `.jsonl` and `.parquet` files, those of its subfolders included, are read in the
            order of their paths. All but Parquet may be compressed, with `.gz` or `.zst` after their ending;
            `.json.gz` and `.json.zst` are JSON lines too, as published corpora have them. What is hidden is not read.
        column: The column, or JSON key, that holds the text. Default: `"text"`.
        encoding: Encoding of plain text and JSON lines. Default: `"utf-8"`.

    Returns:
        The documents that hold anything but white space; at least one.

    Raises:
        DocumentError: If the path does not exist or holds no document, or as `iterate_documents`.
    """
    documents = list(iterate_documents(find_files(path), column, encoding))
    if not documents:
        raise DocumentError(
            f"text {str(path)!r} is empty: it has no document with a visible character. Add text to it."
        )
    return documents


def find_files(path: str | Path) -> list[Path]:
    """The files to read: `path` itself, or those of the folder `path` that hold text, in the order of their paths.

    Args:
        path: A file or a folder.

    Raises:
        DocumentError: If the path does not exist, or is a folder without such files.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DocumentError(f"text is {str(path)!r}, which does not exist; expected a file or a folder.")
    files = [file for file in walk_files(path) if _is_read(file)]
    if not files:
        raise DocumentError(
            f"text is {str(path)!r}, a folder without text; expected files ending in {', '.join(FOLDER_SUFFIXES)}."
        )
    return files


def describe_files(path: str | Path) -> str | None:
    """One line on how many files of a folder are read, and of what kinds the others are; None if `path` is no folder.

    Args:
        path: As in `find_files`.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        return None
    files = walk_files(path)
    others = collections.Counter(_ending(file) for file in files if not _is_read(file))
    line = f"read {len(files) - others.total():,} of {len(files):,} files of {path}"
    if not others:
        return line
    named = [f"{count:,} {ending}" for ending, count in others.most_common(_ENDINGS_NAMED)]
    if unnamed := others.total() - sum(count for _, count in others.most_common(_ENDINGS_NAMED)):
        named.append(f"{unnamed:,} with other endings")
    return f"{line}; not read: {', '.join(named)} (expected {', '.join(FOLDER_SUFFIXES)})"


def endings(path: Path) -> tuple[str, str]:
    """The ending of a file's name, and the one behind it that says how it is compressed, as in `(".jsonl", ".gz")`.

    Args:
        path: The file, which need not exist.

    Returns:
        Both may be empty.
    """
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return Path(path.name.removesuffix(compression)).suffix, compression


def is_text_name(path: Path) -> bool:
    """Whether a folder's file of this name is read.

    Args:
        path: The file, which need not exist.
    """
    suffix, compression = endings(path)
    if compression:
        return suffix == ".json" or (suffix in FOLDER_SUFFIXES and suffix != ".parquet")
    return suffix in FOLDER_SUFFIXES


def is_compressed(path: Path) -> bool:
    """Whether the text in a file takes more room than the file.

    Args:
        path: The file.
    """
    suffix, compression = endings(path)
    return bool(compression) or suffix == ".parquet"


def iterate_documents(files: Iterable[Path], column: str = "text", encoding: str = "utf-8") -> Iterator[str]:
    """Read files one after the other; documents that hold nothing but white space are left out.

    Args:
        files: As from `find_files`.
        column: As in `read_documents`. Default: `"text"`.
        encoding: As in `read_documents`. Default: `"utf-8"`.

    Raises:
        DocumentError: For what is not text in this encoding, for rows without text in the column, for what is neither
            JSON nor Parquet nor compressed although its name says so, for a file that cannot be opened, and for Parquet
            and `.zst` where `datasets` is not installed.
    """
    return (document for file in files for document in _read_file(file, column, encoding) if document.strip())


def document_rows(
    files: Iterable[Path], column: str = "text", encoding: str = "utf-8"
) -> Iterator[tuple[RowPlace, Any]]:
    """The rows of the documents that `iterate_documents` gives, each with where it is, for messages.

    Args:
        files: As from `find_files`.
        column: As in `read_documents`. Default: `"text"`.
        encoding: As in `read_documents`. Default: `"utf-8"`.

    Raises:
        DocumentError: As `iterate_documents`; for plain text, which has no rows.
    """
    for file in files:
        rows = rows_of(file, encoding)
        if rows is None:
            raise DocumentError(
                f"file {str(file)!r} is plain text, which has no columns; expected JSON lines or Parquet, as midus-cluster "
                "assign writes."
            )
        yield from (row for row in rows if text_of_row(row[1], column, row[0]).strip())


def codec_of(encoding: str) -> str:
    """Python's name of an encoding, such that a byte order mark is no text.

    Args:
        encoding: Any of its names.

    Raises:
        DocumentError: If there is none of that name.
    """
    try:
        name = codecs.lookup(encoding).name
    except LookupError as error:
        raise DocumentError(f"encoding is {encoding!r}, which Python does not know; expected e.g. 'utf-8'.") from error
    return "utf-8-sig" if name == "utf-8" else name


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


def import_datasets(wanted_by: str) -> ModuleType:
    """Import the package `datasets`, which is an extra.

    Args:
        wanted_by: What cannot be read without it, for the message.

    Raises:
        DocumentError: If it is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DocumentError(f"{wanted_by} needs the package datasets; install it with pip install datasets.")
    import datasets

    return datasets


def first_line(error: Exception) -> str:
    """What another library says, without what follows its first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def walk_files(folder: Path) -> list[Path]:
    """All files below a folder, without what is hidden, and the linked folders, which are not entered.

    Args:
        folder: An existing one.
    """
    found: list[Path] = []
    for place, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        linked = [name for name in subfolders if Path(place, name).is_symlink()]
        found += [Path(place, name) for name in (*names, *linked) if not name.startswith(".")]
    return sorted(found)


def _is_read(path: Path) -> bool:
    return is_text_name(path) and not path.is_dir()


def _ending(path: Path) -> str:
    if path.is_dir():
        return "linked folder"
    return "".join(endings(path)) or "without an ending"


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


def has_column(path: str | Path, column: str, encoding: str = "utf-8") -> bool:
    """Whether a row of a file, or of the files of a folder, has a column; plain text has none.

    Args:
        path: As in `find_files`.
        column: Its name.
        encoding: Of JSON lines. Default: `"utf-8"`.

    Raises:
        DocumentError: If a file cannot be read.
    """
    return any(column in row for file in find_files(path) for _, row in rows_of(file, encoding) or ())


def _read_file(path: Path, column: str, encoding: str) -> Iterator[str]:
    rows = rows_of(path, encoding)
    if rows is None:
        return iter([read_text(path, encoding)])
    return (text_of_row(row, column, place) for place, row in rows)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed if its name says so."""
    compression = endings(path)[1]
    try:
        with _open_compressed(path, compression) if compression else path.open("rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        if not compression or not path.is_file() or not os.access(path, os.R_OK):
            raise DocumentError(f"file {str(path)!r} cannot be read: {first_line(error)}.") from error
        raise DocumentError(
            f"file {str(path)!r} is no whole {COMPRESSIONS[compression]} archive: {first_line(error)}. "
            "Fetch it or compress it again."
        ) from error


def _open_compressed(path: Path, compression: str) -> Any:
    if compression == ".gz":
        return gzip.open(path)
    import_datasets(f"file {str(path)!r}")
    import pyarrow  # which datasets brings; Python's own zstd came with 3.14

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=COMPRESSIONS[compression]))


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
            yield RowPlace(place, path, number), row
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
        with _open(path) as stream, io.TextIOWrapper(stream, encoding=codec_of(encoding), newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = RowPlace(f"line {number} of {str(path)!r}", path, number)
                    yield place, _parse(line, place)
    except UnicodeDecodeError as error:
        raise _not_text(path, encoding, f"{error.reason} after line {number}") from error


def _parse(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DocumentError(f"{place} is not JSON: {error}. Expected one object per line.") from error


def read_text(path: Path, encoding: str) -> str:
    """The text of a file, decompressed if its name says so.

    Args:
        path: The file.
        encoding: Of its text.

    Raises:
        DocumentError: If it cannot be read, or is not text in this encoding.
    """
    try:
        with _open(path) as stream:
            text = stream.read().decode(codec_of(encoding))
    except UnicodeDecodeError as error:
        raise _not_text(path, encoding, f"{error.reason} at byte {error.start}") from error
    if "\0" in text:  # which passes for UTF-8
        raise _not_text(path, encoding, "it has zero bytes")
    return text


def _not_text(path: Path, encoding: str, reason: str) -> DocumentError:
    return DocumentError(
        f"file {str(path)!r} is not text in {encoding}: {reason}. Take it out, convert it, or set encoding."
    )
