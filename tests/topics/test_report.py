"""The largest nodes of a tree are those of a count by hand, and their words those that others have less of."""

import numpy as np
import pytest
from topics.trees import random_tree

from midus_hf.cli.clusters import nodes_with_words

LEAVES = np.array([0, 0, 0, 1, 4, 4, 5, 5, 5, 5])
DOCUMENTS = np.array([0, 0, 1, 2, 3, 4, 5, 5, 6, 7])
TEXTS = ["", "the salt, an ACID of 3", "the acid and salt", "the ball game", "the ball and salt", "", "", ""]
TREE = random_tree(3, 2)


def test_nodes_have_their_windows_and_the_words_that_others_have_less_of():
    assert nodes_with_words(TREE, LEAVES, DOCUMENTS, TEXTS, 1, 16) == {
        0: (4, ["acid", "salt", "the", "and"]),
        1: (6, ["ball", "game"]),
    }
    assert nodes_with_words(TREE, LEAVES, DOCUMENTS, TEXTS, 2, 1) == {5: (4, [])}


def test_the_largest_nodes_are_shown_by_rising_number():
    assert {node: size for node, (size, _) in nodes_with_words(TREE, LEAVES, DOCUMENTS, TEXTS, 2, 2).items()} == {
        0: 3,
        5: 4,
    }


@pytest.mark.parametrize(
    ("level", "most", "message"),
    [
        (0, 1, r"level is 0; expected a number from 1 to 2, the levels of the tree\."),
        (3, 1, r"level is 3; expected a number from 1 to 2"),
        (1, 0, r"nodes is 0; expected at least 1\."),
    ],
)
def test_numbers_out_of_range_are_refused(level, most, message):
    with pytest.raises(ValueError, match=message):
        nodes_with_words(TREE, LEAVES, DOCUMENTS, TEXTS, level, most)
