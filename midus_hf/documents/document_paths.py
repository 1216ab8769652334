"""Paths of documents in a tree of topics, read from the columns of the documents' files."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from midus_hf.config.fetched_blocks import TREE_COLUMN
from midus_hf.documents.document_reading import value_of_row
from midus_hf.documents.text_files import DocumentError


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
