"""The documents of text files, JSON lines, Parquet, and folders of them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from midus_hf.documents.document_error import DocumentError
from midus_hf.documents.file_rows import RowPlace, rows_of, text_of_row
from midus_hf.documents.file_text import read_text
from midus_hf.documents.text_files import find_files


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
                f"file {str(file)!r} is plain text, which has no columns; expected JSON lines or Parquet, as midus cluster "
                "assign writes."
            )
        yield from (row for row in rows if text_of_row(row[1], column, row[0]).strip())


def _read_file(path: Path, column: str, encoding: str) -> Iterator[str]:
    rows = rows_of(path, encoding)
    if rows is None:
        return iter([read_text(path, encoding)])
    return (text_of_row(row, column, place) for place, row in rows)
