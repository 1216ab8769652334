"""Topics from a column of a corpus instead of clusters: each name is a node, and its path needs no embedding."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from midus_hf.config.errors import RequestError
from midus_hf.files.json_text import read_json
from midus_hf.files.outputs import atomic_write

if TYPE_CHECKING:
    from datasets import Dataset

# File next to the windows of a tree whose nodes have names.
NAMES_FILE = "topics.json"

_CORPUS = "the corpus, without blank ones,"


@dataclass(frozen=True)
class TopicNames:
    """The names of a tree's nodes: of the first level, each with those of its children, which are numbered in this order."""

    columns: tuple[str, ...]  # with the names, from the first level down
    names: dict[str, Any]

    @classmethod
    def from_rows(cls, rows: "Dataset", columns: Sequence[str]) -> "TopicNames":
        """Return the names in columns of a corpus, in the order of their first occurrence."""
        absent = [column for column in columns if column not in rows.column_names]
        if absent:
            raise RequestError(
                f"the corpus has no column {absent[0]!r}, only {', '.join(rows.column_names)}; expected a column with the name of "
                "each text's topic. Correct --topic-column."
            )
        names: dict[str, Any] = {}
        for path in _paths_of_names(rows, columns):
            node = names
            for name in path:
                node = node.setdefault(name, {})
        return cls(tuple(columns), names)

    @property
    def branching(self) -> int:
        """The most children that a node has, at least 2."""

        def most(node: dict[str, Any]) -> int:
            return max(len(node), *map(most, node.values())) if node else 0

        return max(2, most(self.names))

    def paths(self, rows: "Dataset | Mapping[str, Sequence[Any]]", label: str = _CORPUS) -> np.ndarray:
        """Return the node at each level of each text by its names, `[texts, levels]`, int64; messages call the rows `label`."""
        branching, paths = self.branching, []
        for number, path in enumerate(_paths_of_names(rows, self.columns, label), start=1):
            below, node, nodes = self.names, 0, []
            for name in path:
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
        with atomic_write(folder / NAMES_FILE) as partial:
            record = {"columns": self.columns, "names": self.names}
            partial.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "TopicNames | None":
        """Return the names in a folder of windows; None if its tree was clustered."""
        path = folder / NAMES_FILE
        if not path.is_file():
            return None
        record = read_json(path)
        return cls(tuple(record["columns"]), record["names"])


def _paths_of_names(
    rows: "Dataset | Mapping[str, Sequence[Any]]", columns: Sequence[str], label: str = _CORPUS
) -> Iterator[tuple[str, ...]]:
    for number, path in enumerate(zip(*(rows[column] for column in columns), strict=True), start=1):
        for name, column in zip(path, columns, strict=True):
            if not isinstance(name, str) or not name.strip():
                raise RequestError(
                    f"row {number} of {label} has {name!r} under {column!r}; expected the name of its topic. "
                    "Fill it in, or remove the row."
                )
        yield path
