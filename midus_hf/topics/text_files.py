"""Names of files that hold text, the search for them in a folder, and their text, which is decompressed if the name says so."""

import codecs
import collections
import contextlib
import gzip
import importlib.util
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

# Endings of the files that are read from a folder. All but the last may be followed by one of `COMPRESSIONS`.
FOLDER_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")

# Compression formats by the ending of a file's name.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

_ENDINGS_NAMED = 5


class DocumentError(ValueError):
    """Error for text that cannot be read, or for a corpus with too little text."""


def first_line(error: Exception) -> str:
    """Return the first line of another library's error message, or the error's type if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def import_datasets(wanted_by: str) -> ModuleType:
    """Import the optional package `datasets`.

    Args:
        wanted_by: What needs the package, for the error message.

    Raises:
        DocumentError: If the package is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DocumentError(f"{wanted_by} needs the package datasets; install it with pip install datasets.")
    import datasets

    return datasets


def find_files(path: str | Path) -> list[Path]:
    """Return the files to read: `path` itself, or the text files in the folder `path`, in the order of their paths.

    Args:
        path: A file or a folder.

    Raises:
        DocumentError: If the path is empty or does not exist, or is a folder without text files.
    """
    if path == "":
        raise DocumentError("text is ''; expected a file or a folder.")
    path = Path(path).expanduser()
    if path.is_file():
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
    """Return one line on how many files of a folder are read, and which kinds are not; None if `path` is not a folder.

    Args:
        path: A file or a folder, as in `find_files`.
    """
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


def endings(path: Path) -> tuple[str, str]:
    """Return the ending of a file's name, and the ending after it that names a compression, such as `(".jsonl", ".gz")`.

    Either may be empty.

    Args:
        path: Path of the file, which need not exist.
    """
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return Path(path.name.removesuffix(compression)).suffix, compression


def _walk_files(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted, without hidden ones. Linked folders are returned like files and not entered.

    Args:
        folder: An existing folder.
    """
    files: list[Path] = []
    for folder_path, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        linked = [name for name in subfolders if Path(folder_path, name).is_symlink()]
        files += [Path(folder_path, name) for name in (*names, *linked) if not name.startswith(".")]
    return sorted(files)


def _is_read(path: Path) -> bool:
    """Return whether a file is read if it lies in a folder."""
    suffix, compression = endings(path)
    can_be_read = suffix in FOLDER_SUFFIXES
    if compression:
        can_be_read = suffix == ".json" or (can_be_read and suffix != ".parquet")
    return can_be_read and not path.is_dir()


def _ending(path: Path) -> str:
    if path.is_dir():
        return "linked folder"
    return "".join(endings(path)) or "without an ending"


def codec_of(encoding: str) -> str:
    """Return Python's name of an encoding; for UTF-8, of the variant that drops a byte order mark.

    Args:
        encoding: Any name of the encoding.

    Raises:
        DocumentError: If Python does not know the name.
    """
    try:
        name = codecs.lookup(encoding).name
    except LookupError as error:
        raise DocumentError(f"encoding is {encoding!r}, which Python does not know; expected e.g. 'utf-8'.") from error
    return "utf-8-sig" if name == "utf-8" else name


def read_text(path: Path, encoding: str) -> str:
    """Return the text of a file, decompressed if the file's name says so.

    Raises:
        DocumentError: If the file cannot be read, or is not text in this encoding.
    """
    try:
        with open_file(path) as stream:
            text = stream.read().decode(codec_of(encoding))
    except UnicodeDecodeError as error:
        raise not_text(path, encoding, f"{error.reason} at byte {error.start}") from error
    if "\0" in text:  # zero bytes are valid UTF-8, but no text
        raise not_text(path, encoding, "it has zero bytes")
    return text


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open the bytes of a file, decompressed if the file's name says so."""
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
    import pyarrow  # a dependency of datasets; Python itself has zstd only since 3.14

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=COMPRESSIONS[compression]))


def not_text(path: Path, encoding: str, reason: str) -> DocumentError:
    """Return the error for a file that is not text in its encoding."""
    return DocumentError(
        f"file {str(path)!r} is not text in {encoding}: {reason}. Take it out, convert it, or set encoding."
    )
