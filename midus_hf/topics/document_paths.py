"""Paths of documents in a tree of topics, from paths of their windows or names of their topics."""

import collections
import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from midus_hf.config.errors import RequestError
from midus_hf.data.corpus import TREE_COLUMN
from midus_hf.files.checkpoint_files import read_json
from midus_hf.files.outputs import write_text
from midus_hf.sources.characters import visible_text
from midus_hf.topics.building import unit_rows
from midus_hf.topics.memory_retriever import MemoryRetriever, paths_near_topics
from midus_hf.topics.tree import ClusterTree
from midus_hf.topics.windows import StoredWindows, cut_windows

if TYPE_CHECKING:
    from datasets import Dataset

WindowPaths = Sequence[list[int]]  # path of each window of a document
_STRETCH = 1024  # number of windows whose paths are looked up at a time


def document_paths(
    retriever: MemoryRetriever,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    window_tokens: int = 2048,
) -> Iterator[tuple[int, WindowPaths]]:
    """Yield the index of each text that is not blank, with the paths of its windows in a tree.

    `tokenizer` cuts windows of `window_tokens` tokens, and `retriever` looks up the path of each.
    """
    windows = cut_windows(texts, tokenizer, window_tokens)

    def paths() -> Iterator[tuple[int, list[int]]]:
        while stretch := list(itertools.islice(windows, _STRETCH)):
            found = retriever.paths([window.text for window in stretch]).tolist()
            yield from zip([window.document for window in stretch], found, strict=True)

    for document, group in itertools.groupby(paths(), key=lambda pair: pair[0]):
        yield document, [path for _, path in group]


def stored_paths(tree: ClusterTree, stored: StoredWindows) -> Iterator[tuple[int, WindowPaths]]:
    """Yield as `document_paths` does, from the stored embeddings of a tree's own corpus."""
    starts = range(0, len(stored.documents), _STRETCH)
    stretches = (unit_rows(stored.embeddings, slice(begin, begin + _STRETCH)) for begin in starts)
    paths = itertools.chain.from_iterable(paths_near_topics(tree, stretch).tolist() for stretch in stretches)
    for document, count in enumerate(np.bincount(stored.documents).tolist()):
        yield document, list(itertools.islice(paths, count))


def rows_with_paths(
    rows: "Dataset", paths: Iterable[tuple[int, WindowPaths]], tree: ClusterTree
) -> Iterator[dict[str, Any]]:
    """Yield each row of a corpus with its columns, its index as `document`, and `path_columns`.

    Args:
        rows: The corpus, without blank texts, as `midus_hf.data.corpus.read_corpus` reads it.
        paths: Paths of the windows of each row, from `document_paths`.
        tree: The tree of the paths.

    Raises:
        RequestError: If a column of these names does not come from an earlier assignment.
    """
    reserved = [column for column in ("document", "windows", TREE_COLUMN) if column in rows.column_names]
    if reserved and "memory_ids" not in rows.column_names:
        raise RequestError(
            f"the corpus has a column {reserved[0]!r}, which is written with the paths of documents; expected columns of other "
            "names, or the columns of an earlier assignment. Rename the column."
        )
    for row, (document, windows) in zip(rows, paths, strict=True):
        yield {**row, "document": document, **path_columns(windows, tree)}


def path_columns(windows: WindowPaths, tree: ClusterTree) -> dict[str, Any]:
    """Return the columns with the place of a document in a tree, by the paths of its windows.

    They are `memory_ids`, the most frequent path (the first among equals), by which a model fetches blocks; `memory_tree`, the
    fingerprint of the tree; and `windows`. A path with -1 at every level is that of the generic memory.
    """
    ((path, _),) = collections.Counter(map(tuple, windows)).most_common(1)
    return {"memory_ids": list(path), TREE_COLUMN: tree.fingerprint, "windows": windows}


NAMES_FILE = "topics.json"  # file next to the windows of a tree whose nodes have names
_CORPUS = "the corpus, without blank ones,"


@dataclass(frozen=True)
class TopicNames:
    """The names of a tree's nodes: of the first level, each with its children's, in order."""

    columns: tuple[str, ...]  # with the names, from the first level down
    names: dict[str, Any]

    @classmethod
    def from_rows(cls, rows: "Dataset", columns: Sequence[str]) -> "TopicNames":
        """Return the names in columns of a corpus, in the order of their first occurrence.

        Names that look alike (`visible_text`) are one topic, and this warns about each.
        """
        absent = [column for column in columns if column not in rows.column_names]
        if absent:
            raise RequestError(
                f"the corpus has no column {absent[0]!r}, only {', '.join(rows.column_names)}; expected a column with the name of "
                "each text's topic. Correct --topic-column."
            )
        topics = cls(tuple(columns), {})
        alike: dict[tuple[str, ...], str] = {}
        cases: dict[tuple[str, ...], str] = {}
        for path in dict.fromkeys(_paths_of_names(rows, columns)):
            node = topics.names
            above: tuple[str, ...] = ()
            for name in path:
                look = visible_text(name)
                first = alike.setdefault((*above, look), name)
                other = cases.setdefault((*above, look.casefold()), first)
                if first != name:
                    _warn_of_twins(first, name, "look alike and are one topic")
                elif other != first and name not in node:
                    _warn_of_twins(other, name, "differ in case only and are two topics")
                node = node.setdefault(first, {})
                above = (*above, first)
        return topics

    @property
    def branching(self) -> int:
        """The most children that a node has, at least 2."""

        def most(node: dict[str, Any]) -> int:
            return max(len(node), *map(most, node.values())) if node else 0

        return max(2, most(self.names))

    def paths(self, rows: "Dataset | Mapping[str, Sequence[Any]]", label: str = _CORPUS) -> np.ndarray:
        """Return each text's path by its names, `[texts, levels]`, int64; messages say `label`."""
        branching = self.branching
        paths = []
        alike = dict(_names_by_look(self.names))
        for number, path in enumerate(_paths_of_names(rows, self.columns, label), start=1):
            below = self.names
            node = 0
            nodes = []
            above: tuple[str, ...] = ()
            for name in path:
                name = name if name in below else alike.get((*above, visible_text(name)), name)
                above = (*above, name)
                if name not in below:
                    raise RequestError(
                        f"row {number} of {label} has the topic {' / '.join(path)!r}, which the tree does not know; "
                        "expected a topic that it was built with. Build the tree again, or remove the row."
                    )
                node = branching * node + list(below).index(name)
                nodes.append(node)
                below = below[name]
            paths.append(nodes)
        return np.array(paths, np.int64)

    def save(self, folder: Path) -> None:
        """Write the names into a folder of windows."""
        record = {"columns": self.columns, "names": self.names}
        write_text(folder / NAMES_FILE, json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "TopicNames | None":
        """Return the names in a folder of windows; None if its tree was clustered."""
        path = folder / NAMES_FILE
        if not path.is_file():
            return None
        record = read_json(path)
        return cls(tuple(record["columns"]), record["names"])


def _names_by_look(names: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each name by the names above it and how it looks."""
    for name, below in names.items():
        yield (*above, visible_text(name)), name
        yield from _names_by_look(below, (*above, name))


def _warn_of_twins(first: str, name: str, how: str) -> None:
    warnings.warn(f"the topics {first!a} and {name!a} {how}; write each topic's name in one way.", stacklevel=4)


def _paths_of_names(
    rows: "Dataset | Mapping[str, Sequence[Any]]", columns: Sequence[str], label: str = _CORPUS
) -> Iterator[tuple[str, ...]]:
    for number, path in enumerate(zip(*(rows[column] for column in columns), strict=True), start=1):
        for name, column in zip(path, columns, strict=True):
            if not isinstance(name, str) or not visible_text(name):
                raise RequestError(
                    f"row {number} of {label} has {name!r} under {column!r}; expected the name of its topic. "
                    "Fill it in, or remove the row."
                )
        yield path
