"""Report on a tree, and its tables: sizes of nodes, and words and sample documents of each topic."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import rich.box
from rich.table import Table
from rich.text import Text

from midus_hf.topics.corpus import read_corpus
from midus_hf.topics.tree import ClusterTree

# Number of characters of a sample document that are shown, and of a document that are read for words.
SHOWN, _TEXT = 160, 2000
# Number of documents of a node that are read for words, and of words that are shown.
_READ, _WORDS = 100, 8
_WORD = re.compile(r"[^\W\d_]{3,}")


@dataclass(frozen=True)
class LevelReport:
    """Sizes of one level. Level 0 is the root, which has all windows.

    Args:
        level: The level, from 0.
        nodes: Number of nodes in the level, including empty ones.
        empty: Number of nodes without windows.
        least: Windows of the smallest node that is not empty.
        median: Median number of windows of the nodes that are not empty.
        most: Windows of the largest node.
    """

    level: int
    nodes: int
    empty: int
    least: int
    median: float
    most: int


@dataclass(frozen=True)
class NodeReport:
    """Size and samples of one node.

    Args:
        node: Number of the node in its level.
        windows: Number of its windows.
        samples: Numbers of randomly drawn documents of the node, to be shown.
        read: Numbers of more random documents of the node, to be read for words.
    """

    node: int
    windows: int
    samples: list[int]
    read: list[int]


def level_reports(tree: ClusterTree, leaves: np.ndarray) -> list[LevelReport]:
    """Return a report on each level, starting with the root, from the leaf of each window, `[N]`."""
    reports = []
    for level in range(tree.levels + 1):
        sizes = np.unique(_nodes(tree, leaves, level), return_counts=True)[1]
        count = len(tree.centroids[level - 1]) if level else 1
        median = float(np.median(sizes))
        reports.append(LevelReport(level, count, count - len(sizes), int(sizes.min()), median, int(sizes.max())))
    return reports


def node_reports(
    tree: ClusterTree,
    leaves: np.ndarray,
    documents: np.ndarray,
    *,
    level: int = 1,
    most: int = 16,
    samples: int = 3,
    seed: int = 0,
) -> list[NodeReport]:
    """Return reports on the largest nodes of a level, in the order of their numbers.

    Args:
        leaves: The leaf of each window, `[N]`.
        documents: The document of each window, `[N]`.
        level: The level, from 1. Default: 1.
        most: Largest number of nodes. Default: 16.
        samples: Number of sample documents per node. Default: 3.
        seed: Seed of the samples, which are drawn for each node independently. Default: 0.

    Raises:
        ValueError: If the tree lacks the level, or a number is out of range.
    """
    if not 1 <= level <= tree.levels:
        raise ValueError(f"level is {level}; expected a number from 1 to {tree.levels}, the levels of the tree.")
    for name, value, least in (("nodes", most, 1), ("samples", samples, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}.")
    nodes = _nodes(tree, leaves, level)
    present, sizes = np.unique(nodes, return_counts=True)
    reports = []
    for index in sorted(np.argsort(-sizes, kind="stable")[:most].tolist()):
        node = int(present[index])
        members = np.unique(documents[nodes == node])
        drawn = np.random.default_rng([seed, level, node]).permutation(members).tolist()
        reports.append(NodeReport(node, int(sizes[index]), sorted(drawn[:samples]), sorted(drawn[:_READ])))
    return reports


def sample_texts(corpus: str, column: str, numbers: Sequence[int]) -> dict[int, str]:
    """Return the beginnings of documents by number, each on one line.

    Raises:
        ValueError: If the corpus has too few documents.
    """
    if not numbers:
        return {}
    texts = read_corpus(corpus, text_column=column)[column]
    if max(numbers) >= len(texts):
        raise ValueError(
            f"{corpus} has no document {max(numbers)}; expected the corpus that the tree was built from. Give it by --corpus."
        )
    return {number: " ".join(texts[number][:_TEXT].split()) for number in numbers}


def topic_words(nodes: Sequence[NodeReport], texts: Mapping[int, str]) -> list[list[str]]:
    """Return the words that set each node apart: words in many of its documents that are in few documents of the others."""
    counts = [
        Counter(word for number in node.read for word in set(_WORD.findall(texts.get(number, "").lower())))
        for node in nodes
    ]
    everywhere, documents = sum(counts, Counter[str]()), sum(len(node.read) for node in nodes)
    by_node = []
    for node, own in zip(nodes, counts, strict=True):
        shares = {word: count / len(node.read) for word, count in own.items()}
        ratios = {word: share * documents / everywhere[word] for word, share in shares.items()}
        # Squared, so that words of every text, which chance puts into some topics more than into others, weigh little.
        weights = {word: shares[word] * math.log(ratio) ** 2 for word, ratio in ratios.items() if ratio > 1}
        by_node.append(sorted(weights, key=lambda word: (-weights[word], word))[:_WORDS])
    return by_node


def level_table(levels: Sequence[LevelReport]) -> Table:
    """Return a table with a row per report of `level_reports`."""
    table = _table("Windows of the nodes of each level")
    for name in ("level", "nodes", "empty", "least", "median", "most"):
        table.add_column(name, justify="right")
    for row in levels:
        sizes = [f"{row.nodes:,}", f"{row.empty:,}", f"{row.least:,}", f"{row.median:,.1f}", f"{row.most:,}"]
        table.add_row(str(row.level), *sizes)
    return table


def node_table(nodes: Sequence[NodeReport], level: int, texts: Mapping[int, str]) -> Table:
    """Return a table with a row per report of `node_reports`: words of the topic, and a line for each sample document."""
    table = _table(f"Nodes of level {level}")
    for name in ("node", "windows"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("words, and documents")  # the only column that a narrow terminal may shrink
    for node, node_words in zip(nodes, topic_words(nodes, texts), strict=True):
        lines = Text(no_wrap=True, overflow="ellipsis")
        lines.append(" ".join(node_words), "bold")
        lines.append("".join(f"\n{texts.get(number, '')[:SHOWN]}" for number in node.samples))
        table.add_row(str(node.node), f"{node.windows:,}", lines)
    return table


def _nodes(tree: ClusterTree, leaves: np.ndarray, level: int) -> np.ndarray:
    """Return the node of each window in a level; level 0 is the root, node 0."""
    if level == 0:
        return np.zeros(len(leaves), np.int64)
    return np.asarray(leaves, np.int64) // tree.branching ** (tree.levels - level)


def _table(title: str) -> Table:
    return Table(title=title, box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
