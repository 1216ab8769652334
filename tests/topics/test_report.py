"""Sizes, purity and mutual information are those of a count by hand."""

import collections
import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from midus_hf.look.tree_picture import draw_tree
from midus_hf.topics.report import (
    commonest_labels,
    level_reports,
    level_table,
    node_reports,
    node_table,
    sample_texts,
)

LEAVES = np.array([0, 0, 0, 1, 4, 4, 5, 5, 5, 5])
LABELS = np.array([0, 0, 1, 1, 2, 2, 0, 2, 2, 2])
DOCUMENTS = np.array([0, 0, 1, 2, 3, 4, 5, 5, 6, 7])
NAMES = ["animal", "plant", "act"]


def entropy(counts) -> float:
    total = sum(counts)
    return -sum(count / total * math.log(count / total) for count in counts)


def agreement_by_hand(nodes, labels) -> tuple[float, float]:
    """Purity and normalised mutual information."""
    by_node = collections.defaultdict(collections.Counter)
    for node, label in zip(nodes, labels, strict=True):
        by_node[node][label] += 1
    purity = sum(max(counts.values()) for counts in by_node.values()) / len(nodes)
    of_labels, of_nodes = (entropy(collections.Counter(given_).values()) for given_ in (labels, nodes))
    within = sum(sum(counts.values()) / len(nodes) * entropy(counts.values()) for counts in by_node.values())
    if of_labels == of_nodes == 0:
        return purity, 1.0
    return purity, (of_labels - within) / ((of_labels + of_nodes) / 2)


def test_levels_are_counted_from_the_root():
    root, first, second = level_reports(3, 2, LEAVES)
    assert (root.nodes, root.empty, root.least, root.median, root.most) == (1, 0, 10, 10, 10)
    assert (first.nodes, first.empty, first.least, first.median, first.most) == (3, 1, 4, 5, 6)
    assert (second.nodes, second.empty, second.least, second.median, second.most) == (9, 5, 1, 2.5, 4)
    assert (root.purity, root.nmi) == (None, None)


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), min_size=1, max_size=40))
def test_agreement_with_labels_is_that_of_a_count_by_hand(pairs):
    leaves, labels = (np.array(values) for values in zip(*pairs, strict=True))
    for row in level_reports(3, 2, leaves, labels):
        purity, nmi = agreement_by_hand((leaves // 3 ** (2 - row.level)).tolist(), labels.tolist())
        assert row.purity == pytest.approx(purity)
        assert row.nmi == pytest.approx(nmi, abs=1e-6)


def test_nodes_have_their_commonest_labels_and_some_documents():
    first, second = node_reports(3, 2, LEAVES, DOCUMENTS, LABELS, NAMES, samples=2)
    assert (first.node, first.windows, first.labels) == (0, 4, [("animal", 0.5), ("plant", 0.5)])
    assert (second.node, second.windows) == (1, 6) and second.labels[0] == ("act", pytest.approx(5 / 6))
    assert len(first.samples) == 2 and set(first.samples) <= {0, 1, 2}
    (largest,) = node_reports(3, 2, LEAVES, DOCUMENTS, level=2, most=1, samples=9)
    assert (largest.node, largest.windows, largest.labels, largest.samples) == (5, 4, [], [5, 6, 7])
    assert commonest_labels(LEAVES // 3, LABELS) == {0: 0, 1: 2}


def test_the_seed_draws_the_documents():
    leaves, documents = np.zeros(200, int), np.arange(200)
    drawn = [node_reports(3, 2, leaves, documents, seed=seed)[0].samples for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_sample_texts_are_the_beginnings_of_documents(corpus):
    texts = sample_texts(corpus, [3, 0])
    assert texts == {0: "w0", 3: "w28 w29 w0 w1 w2 w3 w4 w5 w6"}
    assert sample_texts(corpus, []) == {}


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"level": 0}, r"level is 0; expected a number from 1 to 2, the levels of the tree\."),
        ({"level": 3}, r"level is 3; expected a number from 1 to 2"),
        ({"most": 0}, r"nodes is 0; expected at least 1\."),
        ({"samples": -1}, r"samples is -1; expected at least 0\."),
    ],
)
def test_numbers_out_of_range_are_refused(given_, message):
    with pytest.raises(ValueError, match=message):
        node_reports(3, 2, LEAVES, DOCUMENTS, **given_)


def test_tables_have_all_columns_on_a_narrow_terminal():
    nodes = node_reports(3, 2, LEAVES, DOCUMENTS, LABELS, NAMES, samples=1)
    texts = dict.fromkeys(range(8), "a text " * 30)
    for table, words in (
        (level_table(level_reports(3, 2, LEAVES, LABELS)), ["level", "purity", "NMI", "70.0%"]),
        (node_table(nodes, 1, texts), ["node", "windows", "act 83%, animal 17%", "a text a", "…"]),
    ):
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(table)
        printed = console.export_text()
        assert all(word in printed for word in words), printed
        assert max(map(len, printed.splitlines())) <= 80
    unlabelled = node_table(node_reports(3, 2, LEAVES, DOCUMENTS), 1, texts)
    assert [column.header for column in unlabelled.columns] == ["node", "windows", "documents"]


@pytest.mark.parametrize(("suffix", "labels"), [(".png", None), (".svg", LABELS), (".pdf", LABELS)])
def test_a_picture_is_drawn(tmp_path, suffix, labels):
    path = tmp_path / f"tree{suffix}"
    draw_tree(3, 2, LEAVES, path, labels, NAMES)
    assert path.stat().st_size > 1000
    if suffix == ".svg":
        assert "<svg" in path.read_text()[:1000]
