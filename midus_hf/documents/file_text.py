"""The text of a file, which is decompressed if its name says so."""

import codecs
import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from midus_hf.documents.document_error import DocumentError, first_line, import_datasets
from midus_hf.documents.text_files import COMPRESSIONS, endings


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
