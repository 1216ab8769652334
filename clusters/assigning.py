"""The paths of documents, window by window."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from clusters.corpus import Document, Window, cut_windows
from midus_config.fetched_blocks import TREE_COLUMN
from midus_hf.retrieval import MemoryRetriever

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
        documents: As from `read_corpus`, each with a number of its own.
        window_tokens: Tokens of a window. Default: 2048.
        blocked: As in `ClusterTree.paths`. Default: none.

    Returns:
        For each document that holds anything but white space `document`, its number; `text`; `windows`, the path of each of
        its windows; `memory_ids`, the path which most of them take, the first of those among equals: by it a model fetches
        blocks; and `memory_tree`, the fingerprint of the tree.

    Raises:
        ValueError: As `MemoryRetriever.paths`.
    """
    windows = cut_windows(documents, tokenizer, window_tokens)
    found = _window_paths(retriever, windows, blocked)
    for number, group in itertools.groupby(found, key=lambda pair: pair[0]):
        found_here = list(group)
        paths, text = [path for _, _, path in found_here], found_here[0][1]
        ((path, _),) = collections.Counter(map(tuple, paths)).most_common(1)
        of_document = {"document": number, "text": text, "memory_ids": list(path)}
        yield {**of_document, TREE_COLUMN: retriever.tree.fingerprint, "windows": paths}


def _window_paths(
    retriever: MemoryRetriever, windows: Iterator[Window], blocked: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, str, list[int]]]:
    while stretch := list(itertools.islice(windows, _STRETCH)):
        paths = retriever.paths([window.text for window in stretch], blocked).tolist()
        for window, path in zip(stretch, paths, strict=True):
            yield window.document.number, window.document.text, path
