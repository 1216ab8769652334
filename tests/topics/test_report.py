"""The largest nodes of a tree are those of a count by hand, and their words those that others have less of."""

import numpy as np
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
    largest = nodes_with_words(TREE, LEAVES, DOCUMENTS, TEXTS, 2, 2)
    assert [(node, size) for node, (size, _) in largest.items()] == [(0, 3), (5, 4)], "by rising number"
    assert largest[5] == (4, [])
