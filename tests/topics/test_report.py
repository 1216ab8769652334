"""Sizes of nodes are those of a count by hand."""

import io

import numpy as np
import pytest
from rich.console import Console
from topics.trees import random_tree

from midus_hf.topics.report import (
    NodeReport,
    level_reports,
    level_table,
    node_reports,
    node_table,
    sample_texts,
    topic_words,
)

LEAVES = np.array([0, 0, 0, 1, 4, 4, 5, 5, 5, 5])
DOCUMENTS = np.array([0, 0, 1, 2, 3, 4, 5, 5, 6, 7])
TREE = random_tree(3, 2)


def test_levels_are_counted_from_the_root():
    root, first, second = level_reports(TREE, LEAVES)
    assert (root.nodes, root.empty, root.least, root.median, root.most) == (1, 0, 10, 10, 10)
    assert (first.nodes, first.empty, first.least, first.median, first.most) == (3, 1, 4, 5, 6)
    assert (second.nodes, second.empty, second.least, second.median, second.most) == (9, 5, 1, 2.5, 4)


def test_nodes_have_some_of_their_documents():
    first, second = node_reports(TREE, LEAVES, DOCUMENTS, samples=2)
    assert (first.node, first.windows, second.node, second.windows) == (0, 4, 1, 6)
    assert len(first.samples) == 2 and set(first.samples) <= {0, 1, 2}
    (largest,) = node_reports(TREE, LEAVES, DOCUMENTS, level=2, most=1, samples=9)
    assert (largest.node, largest.windows, largest.samples) == (5, 4, [5, 6, 7])


def test_the_seed_draws_the_documents():
    leaves, documents = np.zeros(200, int), np.arange(200)
    drawn = [node_reports(TREE, leaves, documents, seed=seed)[0].samples for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_sample_texts_are_the_beginnings_of_documents(corpus):
    texts = sample_texts(corpus, "text", [3, 0])
    assert texts == {0: "w0", 3: "w28 w29 w0 w1 w2 w3 w4 w5 w6"}
    assert sample_texts(corpus, "text", []) == {}
    with pytest.raises(ValueError, match=r"has no document 999; expected the corpus that the tree was built from"):
        sample_texts(corpus, "text", [0, 999])


def test_words_of_a_topic_are_those_that_others_have_less_of():
    texts = {0: "The acid, an ACID of 3", 1: "the acid and salt", 2: "the ball game", 3: "the ball and salt"}
    nodes = [NodeReport(0, 2, [], [0, 1]), NodeReport(5, 2, [], [2, 3])]
    assert topic_words(nodes, texts) == [["acid"], ["ball", "game"]]
    assert topic_words([NodeReport(0, 1, [], [9])], {}) == [[]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"level": 0}, r"level is 0; expected a number from 1 to 2, the levels of the tree\."),
        ({"level": 3}, r"level is 3; expected a number from 1 to 2"),
        ({"most": 0}, r"nodes is 0; expected at least 1\."),
        ({"samples": -1}, r"samples is -1; expected at least 0\."),
    ],
)
def test_numbers_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        node_reports(TREE, LEAVES, DOCUMENTS, **changes)


def test_tables_have_all_columns_on_a_narrow_terminal():
    nodes = node_reports(TREE, LEAVES, DOCUMENTS, samples=1)
    for table, words in (
        (level_table(level_reports(TREE, LEAVES)), ["level", "nodes", "empty", "median", "2.5"]),
        (node_table(nodes, 1, dict.fromkeys(range(3), "a text " * 30)), ["node", "windows", "words", "a text a", "…"]),
    ):
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(table)
        printed = console.export_text()
        assert all(word in printed for word in words), printed
        assert max(map(len, printed.splitlines())) <= 80
