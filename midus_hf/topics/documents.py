"""The documents of text files, JSON lines and Parquet, and of folders of them, and the paths in their rows."""

import collections
import contextlib
import gzip
import importlib.util
import io
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from midus_hf.config.fetched_blocks import TREE_COLUMN
from midus_hf.config.wording import first_line
from midus_hf.files.json_text import parse_json

# Endings of JSON lines.
_JSON_LINES = (".jsonl", ".ndjson")

# Endings of the files that are read from a folder. All but the last may be followed by one of `COMPRESSIONS`.
FOLDER_SUFFIXES = (".txt", ".md", *_JSON_LINES, ".parquet")

# Reader in `datasets`, by the ending, of files of rows that would be read here as one text.
_OTHER_ROWS = {".json": "from_json", ".csv": "from_csv", ".tsv": "from_csv"}

# Compression formats by the ending of a file's name.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

_ENDINGS_NAMED = 5


class DocumentError(ValueError):
    """Error for text that cannot be read, or for a corpus with too little text."""


@dataclass(frozen=True)
class Document:
    """A document.

    Args:
        number: Index among the documents that are not blank, from 0.
        text: The whole text.
        row: All columns of the document's row. Default: None; the document is a whole file.
        file: Name of the file that contains the document, below the folder. Default: None; one file was read.
        location: Location of the document in words, for error messages. Default: empty.
    """

    number: int
    text: str
    row: dict[str, Any] | None = None
    file: str | None = None
    location: str = ""


def documents_of(path: str | Path, column: str = "text") -> Iterator[Document]:
    """Yield the documents of a file or a folder one after the other, without the blank ones.

    Args:
        path: A `.jsonl`, `.ndjson` or `.parquet` file, with a document per row; a `.json`, `.csv` or `.tsv` file, which is
            refused; any other file, which is one document; or a folder. Of a folder and its subfolders, the `.txt`, `.md`,
            `.jsonl`, `.ndjson` and `.parquet` files are read in the order of their paths, without hidden ones. All but
            Parquet may be compressed, with `.gz` or `.zst` after the ending. Files ending in `.json.gz` and `.json.zst`
            count as JSON lines, as in published corpora. Text is UTF-8. Endings may be in capitals.
        column: Column, or JSON key, that holds the text. Default: `"text"`.

    Raises:
        DocumentError: If the path does not exist, is a folder without text, or a file of rows of another kind; if a file
            cannot be opened, is not text, or is not the JSON, Parquet or compressed file that its name says; if a row has no text
            in the column; or if `datasets` is not installed, for Parquet and `.zst`.
    """
    numbers, folder = itertools.count(), Path(path).expanduser()
    for file in find_files(path):
        name = file.relative_to(folder).as_posix() if folder.is_dir() else None
        rows = _rows_of(file)
        for location, row in [(f"file {str(file)!r}", None)] if rows is None else rows:
            text = _read_text(file) if rows is None else _text_of(location, row, column)
            if text.strip():
                yield Document(next(numbers), text, row, name, location)


def read_documents(path: str | Path, column: str = "text") -> list[str]:
    """Read the texts of all documents of a file or a folder, as `documents_of` reads them.

    Raises:
        DocumentError: If there is no document, or `documents_of` cannot read a file.
    """
    documents = [document.text for document in documents_of(path, column)]
    if not documents:
        raise DocumentError(
            f"text {str(path)!r} is empty: it has no document with a visible character. Add text to it."
        )
    return documents


def has_column(path: str | Path, column: str) -> bool:
    """Return whether any row of a file, or of a folder's files, has a value in a column. Plain text has no columns.

    Raises:
        DocumentError: If a file cannot be read.
    """
    rows = (row for file in find_files(path) for _, row in _rows_of(file) or ())
    return any(isinstance(row, dict) and row.get(column) is not None for row in rows)


@dataclass(frozen=True)
class DocumentPaths:
    """Paths of documents with the fingerprint of their tree.

    Args:
        paths: The node at each level, `[documents, p]`, int64. A row of -1 is the path of the generic memory.
        tree: Fingerprint of the tree; None if the documents do not name one.
    """

    paths: np.ndarray
    tree: str | None


def read_paths(documents: Iterable[Document], column: str) -> DocumentPaths:
    """Read the paths of documents from a column of their rows.

    Raises:
        DocumentError: If a document is plain text, or its row has no path, or a path of another length or another tree than the
            rows before.
    """
    paths: list[list[int]] = []
    tree: str | None = None
    for document in documents:
        if document.row is None:
            raise DocumentError(
                f"{document.location} is plain text, which has no columns; expected JSON lines or Parquet, as midus cluster "
                "assign writes."
            )
        path: Any = document.row.get(column)
        if not _is_path(path) or (paths and len(path) != len(paths[0])):
            raise DocumentError(
                f"{document.location} has {path!r} under {column!r}; expected the document's node at each level of the tree, as "
                "midus cluster assign writes it, such as [3, 52, 840], or -1 at each level, the path of the generic memory."
            )
        tree_of_row = document.row.get(TREE_COLUMN)
        if paths and tree_of_row != tree:
            raise DocumentError(
                f"{document.location} has {_named(tree_of_row)} under {TREE_COLUMN!r}, and the rows before it have "
                f"{_named(tree)}; expected paths of one tree. Assign all documents by the same tree."
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


def find_files(path: str | Path) -> list[Path]:
    """Return the files to read: `path` itself, or the text files in the folder `path`, in the order of their paths.

    Raises:
        DocumentError: If the path is empty or does not exist, is a folder without text files, or a file of rows of a kind
            that is not read.
    """
    if path == "":
        raise DocumentError("text is ''; expected a file or a folder.")
    path = Path(path).expanduser()
    if path.is_file():
        suffix, compression = _endings(path)
        if suffix in _OTHER_ROWS and not (suffix == ".json" and compression):
            separator = ", sep='\\t'" if suffix == ".tsv" else ""
            reader = f"datasets.Dataset.{_OTHER_ROWS[suffix]}({str(path)!r}{separator})"
            raise DocumentError(
                f"text is {str(path)!r}, whose rows would be read as one text; expected text, JSON lines or Parquet. Convert the "
                f"file: {reader}.to_parquet({path.name.partition('.')[0] + '.parquet'!r})."
            )
        return [path]
    if not path.is_dir():
        raise DocumentError(f"text is {str(path)!r}, which does not exist; expected a file or a folder.")
    files = [file for file in _walk_files(path) if _is_read(file)]
    if not files:
        raise DocumentError(
            f"text is {str(path)!r}, a folder without text; expected files ending in {', '.join(FOLDER_SUFFIXES)}."
        )
    return files


def describe_files(path: str | Path) -> str | None:
    """Return one line on how many files of a folder are read, and which kinds are not; None if `path` is not a folder."""
    path = Path(path).expanduser()
    if not path.is_dir():
        return None
    files = _walk_files(path)
    others = collections.Counter(_ending(file) for file in files if not _is_read(file))
    line = f"read {len(files) - others.total():,} of {len(files):,} files of {path}"
    if not others:
        return line
    phrases = [f"{count:,} {ending}" for ending, count in others.most_common(_ENDINGS_NAMED)]
    if unnamed := others.total() - sum(count for _, count in others.most_common(_ENDINGS_NAMED)):
        phrases.append(f"{unnamed:,} with other endings")
    return f"{line}; not read: {', '.join(phrases)} (expected {', '.join(FOLDER_SUFFIXES)})"


def _endings(path: Path) -> tuple[str, str]:
    """Return the endings of a file and of a compression behind it in small letters, `(".jsonl", ".gz")`; either may be empty."""
    name = path.name.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    return Path(name.removesuffix(compression)).suffix, compression


def _walk_files(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted, without hidden ones. Linked folders are returned like files and not entered."""
    files: list[Path] = []
    for folder_path, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        linked = [name for name in subfolders if Path(folder_path, name).is_symlink()]
        files += [Path(folder_path, name) for name in (*names, *linked) if not name.startswith(".")]
    return sorted(files)


def _is_read(path: Path) -> bool:
    """Return whether a file is read if it lies in a folder."""
    suffix, compression = _endings(path)
    can_be_read = suffix in FOLDER_SUFFIXES
    if compression:
        can_be_read = suffix == ".json" or (can_be_read and suffix != ".parquet")
    return can_be_read and not path.is_dir()


def _ending(path: Path) -> str:
    if path.is_dir():
        return "linked folder"
    return "".join(_endings(path)) or "without an ending"


def _rows_of(path: Path) -> Iterator[tuple[str, Any]] | None:
    """Return an iterator over the rows of JSON lines or Parquet, each after its location; None for plain text."""
    suffix, compression = _endings(path)
    if suffix == ".parquet" and not compression:
        return _parquet_rows(path)
    if suffix in _JSON_LINES or (suffix == ".json" and compression):
        return _json_line_rows(path)
    return None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    _require_datasets(path)
    import datasets

    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"row {number} of {str(path)!r}", row
    except (OSError, ValueError, RuntimeError) as error:
        raise DocumentError(
            f"file {str(path)!r} is no readable Parquet: {first_line(error)}. Write it again."
        ) from error


def _json_line_rows(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with _open_file(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n") as lines:
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
        raise _not_text(path, f"{error.reason} after line {number}") from error


def _text_of(location: str, row: Any, column: str) -> str:
    if not isinstance(row, dict) or column not in row:
        description = f"only {', '.join(map(str, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise DocumentError(f"{location} has no {column!r}, {description}; set column to the one that holds the text.")
    if not isinstance(row[column], str):
        raise DocumentError(f"{location} has a {type(row[column]).__name__} under {column!r}; expected text.")
    return row[column]


def _read_text(path: Path) -> str:
    """Return the text of a file, decompressed if the file's name says so, without a byte order mark."""
    try:
        with _open_file(path) as stream:
            text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_text(path, f"{error.reason} at byte {error.start}") from error
    if "\0" in text:  # zero bytes are valid UTF-8, but no text
        raise _not_text(path, "it has zero bytes")
    return text


@contextlib.contextmanager
def _open_file(path: Path) -> Iterator[BinaryIO]:
    """Open the bytes of a file, decompressed if the file's name says so."""
    compression = _endings(path)[1]
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
    _require_datasets(path)
    import pyarrow  # a dependency of datasets; Python itself has zstd only since 3.14

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=COMPRESSIONS[compression]))


def _require_datasets(path: Path) -> None:
    if importlib.util.find_spec("datasets") is None:
        raise DocumentError(f"file {str(path)!r} needs the package datasets; install it with pip install datasets.")


def _not_text(path: Path, reason: str) -> DocumentError:
    return DocumentError(f"file {str(path)!r} is not text in UTF-8: {reason}. Take it out, or convert it.")
