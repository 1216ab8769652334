"""Paths of documents in a tree of topics, as columns of their files have them."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from midus_hf.documents.document_error import DocumentError


def read_paths(rows: Iterable[tuple[str, Any]], column: str) -> np.ndarray:
    """The paths of documents, `[documents, p]`, int64.

    Args:
        rows: Of the documents, each with where it is, for messages.
        column: That holds the paths.

    Raises:
        DocumentError: If a row has none, or one of another length.
    """
    paths: list[list[int]] = []
    for place, row in rows:
        path = row.get(column)
        is_path = isinstance(path, list) and path and all(type(node) is int and node >= 0 for node in path)
        if not is_path or (paths and len(path) != len(paths[0])):
            raise DocumentError(
                f"{place} has {path!r} under {column!r}; expected its node of each level of the tree, as midus-cluster assign writes "
                "it, such as [3, 52, 840]."
            )
        paths.append(path)
    return np.array(paths, dtype=np.int64).reshape(len(paths), -1)
