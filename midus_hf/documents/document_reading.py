"""The documents of text files, JSON lines and Parquet, and of folders of them."""

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
