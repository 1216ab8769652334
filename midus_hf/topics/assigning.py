"""Paths of documents in a tree of topics, from the paths of their windows."""

import collections
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from midus_hf.config.fetched_blocks import TREE_COLUMN
from midus_hf.topics.building import unit_rows
from midus_hf.topics.documents import Document, DocumentError
from midus_hf.topics.memory_retriever import MemoryRetriever, paths_near_topics
from midus_hf.topics.tree import ClusterTree
from midus_hf.topics.windows import StoredWindows, Window, cut_windows

# Column with the file of a document, below the corpus.
FILE_COLUMN = "file"

# Number of windows whose paths are looked up at a time.
_STRETCH = 1024


def document_paths(
    retriever: MemoryRetriever,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    window_tokens: int = 2048,
) -> Iterator[dict[str, Any]]:
    """Yield each document's row with the document's path in a tree of topics, in the order of the documents.

    Args:
        retriever: Looks up the path of each window.
        tokenizer: Tokenizer that cuts windows, from `load_fast_tokenizer`.
        documents: Documents with distinct numbers, as from `documents_of`.
        window_tokens: Tokens per window. Default: 2048.

    Returns:
        A mapping for each document that is not blank, with the columns of its row, or `text` if it has no row; `file`,
        the file that holds it, below the folder of the corpus; `document`, its number; `windows`, the path of each of
        its windows; `memory_ids`, the path that most of its windows take (the first path among equals), by which a
        model fetches blocks; and `memory_tree`, the fingerprint of the tree. A path with -1 at every level stands for
        the generic memory.

    Raises:
        DocumentError: If a row has no `memory_ids` but a column that is written beside it, which then does not come from an
            earlier assignment.
    """
    windows = cut_windows(documents, tokenizer, window_tokens)
    window_paths = _window_paths(retriever, windows)
    for _, group in itertools.groupby(window_paths, key=lambda pair: pair[0].number):
        windows_with_paths = list(group)
        yield _row(windows_with_paths[0][0], [path for _, path in windows_with_paths], retriever.tree)


def stored_paths(
    tree: ClusterTree,
    stored: StoredWindows,
    documents: Iterable[Document],
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `document_paths` for the corpus that a tree was built from, whose windows are embedded already.

    Args:
        documents: All documents of the corpus, in their order.
    """
    stretches = (
        paths_near_topics(
            tree, unit_rows(stored.embeddings, slice(begin, begin + _STRETCH)), tree.min_similarity
        ).tolist()
        for begin in range(0, len(stored.documents), _STRETCH)
    )
    paths: Iterator[list[int]] = itertools.chain.from_iterable(stretches)
    counts = np.bincount(stored.documents)
    for document, count in zip(documents, counts.tolist(), strict=True):
        yield _row(document, list(itertools.islice(paths, count)), tree)


def _row(document: Document, windows: list[list[int]], tree: ClusterTree) -> dict[str, Any]:
    ((path, _),) = collections.Counter(map(tuple, windows)).most_common(1)
    columns = {"text": document.text} if document.row is None else dict(document.row)
    reserved = [column for column in ("document", "windows", TREE_COLUMN) if column in columns]
    if reserved and "memory_ids" not in columns:
        raise DocumentError(
            f"{document.location} has a column {reserved[0]!r}, which is written beside the paths of documents; expected columns of "
            "other names, or the columns of an earlier assignment. Rename the column."
        )
    if document.file is not None:
        columns.setdefault(FILE_COLUMN, document.file)
    path_columns = {
        "document": document.number,
        "memory_ids": list(path),
        TREE_COLUMN: tree.fingerprint,
        "windows": windows,
    }
    return {**columns, **path_columns}


def _window_paths(retriever: MemoryRetriever, windows: Iterator[Window]) -> Iterator[tuple[Document, list[int]]]:
    while stretch := list(itertools.islice(windows, _STRETCH)):
        paths = retriever.paths([window.text for window in stretch]).tolist()
        for window, path in zip(stretch, paths, strict=True):
            yield window.document, path
