"""Report on a tree, and its tables: sizes of nodes, agreement with gold labels, and sample documents of each topic."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import rich.box
from rich.table import Table
from rich.text import Text

from midus_hf.topics.corpus import Corpus, read_corpus

# Number of characters of a sample document that are shown.
_TEXT = 160


@dataclass(frozen=True)
class LevelReport:
    """Sizes and label agreement of one level. Level 0 is the root, which has all windows.

    Args:
        level: The level, from 0.
        nodes: Number of nodes in the level, including empty ones.
        empty: Number of nodes without windows.
        least: Windows of the smallest node that is not empty.
        median: Median number of windows of the nodes that are not empty.
        most: Windows of the largest node.
        purity: Share of windows that have the commonest label of their node. Default: None; there are no labels.
        nmi: Normalised mutual information of nodes and labels, normalised by the arithmetic mean of their entropies.
            Default: None; there are no labels.
    """

    level: int
    nodes: int
    empty: int
    least: int
    median: float
    most: int
    purity: float | None = None
    nmi: float | None = None


@dataclass(frozen=True)
class NodeReport:
    """Size, labels and samples of one node.

    Args:
        node: Number of the node in its level.
        windows: Number of its windows.
        labels: The node's commonest labels, most frequent first, each with its share of the node's windows; empty
            without labels.
        samples: Numbers of randomly drawn documents of the node.
    """

    node: int
    windows: int
    labels: list[tuple[str, float]]
    samples: list[int]


def level_reports(
    branching: int, levels: int, leaves: np.ndarray, labels: np.ndarray | None = None, roots: int | None = None
) -> list[LevelReport]:
    """Return a report on each level, starting with the root.

    Args:
        branching: Number of children per node.
        levels: Number of levels of the tree.
        leaves: The leaf of each window, `[N]`.
        labels: The label of each window, `[N]`, integers from 0. Default: None.
        roots: Nodes of the first level. Default: None, for `branching`.
    """
    roots = roots or branching
    return [
        _level_report(
            level, roots * branching ** (level - 1) if level else 1, _nodes(leaves, branching, levels, level), labels
        )
        for level in range(levels + 1)
    ]


def node_reports(
    branching: int,
    levels: int,
    leaves: np.ndarray,
    documents: np.ndarray,
    labels: np.ndarray | None = None,
    label_names: Sequence[str] = (),
    *,
    level: int = 1,
    most: int = 16,
    samples: int = 3,
    seed: int = 0,
) -> list[NodeReport]:
    """Return reports on the largest nodes of a level, in the order of their numbers.

    Args:
        branching: Number of children per node.
        levels: Number of levels of the tree.
        leaves: The leaf of each window, `[N]`.
        documents: The document of each window, `[N]`.
        labels: The label of each window, `[N]`, integers from 0. Default: None.
        label_names: Name of each label, by the label's integer. Default: none.
        level: The level, from 1. Default: 1.
        most: Largest number of nodes. Default: 16.
        samples: Number of sample documents per node. Default: 3.
        seed: Seed of the samples, which are drawn for each node independently. Default: 0.

    Raises:
        ValueError: If the tree lacks the level, or a number is out of range.
    """
    if not 1 <= level <= levels:
        raise ValueError(f"level is {level}; expected a number from 1 to {levels}, the levels of the tree.")
    for name, value, least in (("nodes", most, 1), ("samples", samples, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}.")
    nodes = _nodes(leaves, branching, levels, level)
    sizes = np.bincount(nodes)
    largest = np.argsort(-sizes, kind="stable")[:most]
    reports = []
    for node in sorted(largest[sizes[largest] > 0].tolist()):
        members = np.flatnonzero(nodes == node)
        present = np.unique(documents[members])
        drawn = np.random.default_rng([seed, level, node]).choice(present, min(samples, len(present)), replace=False)
        node_labels = [] if labels is None else _commonest(labels[members], label_names)
        reports.append(NodeReport(node, len(members), node_labels, sorted(drawn.tolist())))
    return reports


def sample_texts(corpus: Corpus, numbers: Sequence[int]) -> dict[int, str]:
    """Return the beginnings of documents by number, each on one line. The corpus is read up to the last of these documents."""
    wanted = set(numbers)
    texts: dict[int, str] = {}
    for document in read_corpus(corpus) if wanted else ():
        if document.number in wanted:
            texts[document.number] = " ".join(document.text[: 2 * _TEXT].split())[:_TEXT]
            if len(texts) == len(wanted):
                break
    return texts


def commonest_labels(nodes: np.ndarray, labels: np.ndarray) -> dict[int, int]:
    """Return the commonest label of each node that has windows, or the smallest label among equally common ones."""
    best: dict[int, tuple[int, int]] = {}
    for node, label, count in _pairs(nodes, labels):
        if count > best.get(node, (0, 0))[0]:
            best[node] = (count, label)
    return {node: label for node, (_, label) in best.items()}


def level_table(levels: Sequence[LevelReport]) -> Table:
    """Return a table with a row per report of `level_reports`."""
    table = _table("Windows of the nodes of each level")
    labelled = levels[0].purity is not None
    for name in ("level", "nodes", "empty", "least", "median", "most", *(("purity", "NMI") if labelled else ())):
        table.add_column(name, justify="right")
    for row in levels:
        sizes = [f"{row.nodes:,}", f"{row.empty:,}", f"{row.least:,}", f"{row.median:,.1f}", f"{row.most:,}"]
        table.add_row(str(row.level), *sizes, *((f"{row.purity:.1%}", f"{row.nmi:.3f}") if labelled else ()))
    return table


def node_table(nodes: Sequence[NodeReport], level: int, texts: Mapping[int, str]) -> Table:
    """Return a table with a row per report of `node_reports`: its labels, if any, and a line for each sample document."""
    table = _table(f"Nodes of level {level}")
    labelled = any(node.labels for node in nodes)
    for name in ("node", "windows"):
        table.add_column(name, justify="right", no_wrap=True)
    if labelled:
        table.add_column("labels", no_wrap=True)
    table.add_column("documents")  # the only column that a narrow terminal may shrink
    for node in nodes:
        labels = ", ".join(f"{name} {share:.0%}" for name, share in node.labels)
        lines = Text("\n".join(texts.get(number, "") for number in node.samples), no_wrap=True, overflow="ellipsis")
        table.add_row(str(node.node), f"{node.windows:,}", *([Text(labels)] if labelled else []), lines)
    return table


def _nodes(leaves: np.ndarray, branching: int, levels: int, level: int) -> np.ndarray:
    return np.asarray(leaves, np.int64) // branching ** (levels - level)


def _level_report(level: int, count: int, nodes: np.ndarray, labels: np.ndarray | None) -> LevelReport:
    sizes = np.bincount(nodes, minlength=count)
    present = sizes[sizes > 0]
    agreement: dict[str, Any] = {}
    if labels is not None:
        from sklearn.metrics import normalized_mutual_info_score

        most = dict.fromkeys(np.unique(nodes).tolist(), 0)
        for node, _, windows in _pairs(nodes, labels):
            most[node] = max(most[node], windows)
        agreement = {
            "purity": sum(most.values()) / len(nodes),
            "nmi": float(normalized_mutual_info_score(labels, nodes)),
        }
    return LevelReport(
        level,
        count,
        count - len(present),
        int(present.min()),
        float(np.median(present)),
        int(present.max()),
        **agreement,
    )


def _pairs(nodes: np.ndarray, labels: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Return each pair of node and label that occur together, with its count, ascending."""
    num_labels = int(labels.max()) + 1
    pairs, counts = np.unique(nodes.astype(np.int64) * num_labels + labels, return_counts=True)
    return zip((pairs // num_labels).tolist(), (pairs % num_labels).tolist(), counts.tolist(), strict=True)


def _commonest(labels: np.ndarray, names: Sequence[str], number: int = 3) -> list[tuple[str, float]]:
    counts = np.bincount(labels, minlength=len(names))
    first = np.argsort(-counts, kind="stable")[:number]
    return [(names[label], float(counts[label] / len(labels))) for label in first.tolist() if counts[label]]


def _table(title: str) -> Table:
    return Table(title=title, box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
