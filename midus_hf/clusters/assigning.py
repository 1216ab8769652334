"""The paths of documents, window by window."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from midus_hf.clusters.building import unit_rows
from midus_hf.clusters.corpus import Document, Window, cut_windows
from midus_hf.clusters.window_store import StoredWindows
from midus_hf.config.fetched_blocks import TREE_COLUMN
from midus_hf.retrieval.cluster_tree import ClusterTree
from midus_hf.retrieval.memory_retriever import MemoryRetriever, paths_near_topics

_STRETCH = 1024
"""Windows whose paths are found at a time."""


def document_paths(
    retriever: MemoryRetriever,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    window_tokens: int = 2048,
    blocked: Sequence[tuple[int, int]] = (),
) -> Iterator[dict[str, Any]]:
    """Find the paths of documents, in their order.

    Args:
        retriever: Finds the path of each window.
        tokenizer: From `load_fast_tokenizer`; cuts windows.
        documents: As from `read_corpus` or `read_rows`, each with a number of its own.
        window_tokens: Tokens of a window. Default: 2048.
        blocked: As in `ClusterTree.paths`. Default: none.

    Returns:
        For each document that holds anything but white space the columns of its row, or `text` where it has no row; `document`,
        its number; `windows`, the path of each of its windows; `memory_ids`, the path which most of them take, the first of those
        among equals: by it a model fetches blocks; and `memory_tree`, the fingerprint of the tree. A path of -1 at each level is
        that of the generic memory.

    Raises:
        ValueError: As `MemoryRetriever.paths`.
    """
    windows = cut_windows(documents, tokenizer, window_tokens)
    found = _window_paths(retriever, windows, blocked)
    for _, group in itertools.groupby(found, key=lambda pair: pair[0].number):
        found_here = list(group)
        yield _row(found_here[0][0], [path for _, path in found_here], retriever.tree)


def stored_paths(
    tree: ClusterTree,
    stored: StoredWindows,
    documents: Iterable[Document],
    blocked: Sequence[tuple[int, int]] = (),
) -> Iterator[dict[str, Any]]:
    """As `document_paths`, of the corpus that a tree was built from: its windows are embedded already.

    Args:
        tree: The tree.
        stored: Its windows.
        documents: All documents of the corpus, in their order.
        blocked: As in `ClusterTree.paths`. Default: none.

    Raises:
        ValueError: As `ClusterTree.paths`.
    """
    paths: Iterator[list[int]] = itertools.chain.from_iterable(
        _paths_of_rows(tree, stored, slice(begin, begin + _STRETCH), blocked)
        for begin in range(0, len(stored.documents), _STRETCH)
    )
    counts = np.bincount(stored.documents)
    for document, count in zip(documents, counts.tolist(), strict=True):
        yield _row(document, list(itertools.islice(paths, count)), tree)


def _paths_of_rows(
    tree: ClusterTree, stored: StoredWindows, rows: slice, blocked: Sequence[tuple[int, int]]
) -> list[list[int]]:
    embeddings = unit_rows(stored.embeddings, rows)
    return paths_near_topics(tree, embeddings, tree.paths(embeddings, blocked), tree.min_similarity).tolist()


def _row(document: Document, windows: list[list[int]], tree: ClusterTree) -> dict[str, Any]:
    ((path, _),) = collections.Counter(map(tuple, windows)).most_common(1)
    columns = {"text": document.text} if document.row is None else document.row
    of_paths = {
        "document": document.number,
        "memory_ids": list(path),
        TREE_COLUMN: tree.fingerprint,
        "windows": windows,
    }
    return {**columns, **of_paths}


def _window_paths(
    retriever: MemoryRetriever, windows: Iterator[Window], blocked: Sequence[tuple[int, int]]
) -> Iterator[tuple[Document, list[int]]]:
    while stretch := list(itertools.islice(windows, _STRETCH)):
        paths = retriever.paths([window.text for window in stretch], blocked).tolist()
        for window, path in zip(stretch, paths, strict=True):
            yield window.document, path
