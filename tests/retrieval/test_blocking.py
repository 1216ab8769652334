"""What fits a text best is blocked for that text alone."""

import pytest
import torch
from retrieval.trees import random_tree

from midus_hf.retrieval.memory_retriever import paths_without_best

EMBEDDINGS = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))


def test_without_a_best_node_paths_are_those_of_the_tree():
    tree = random_tree()
    assert torch.equal(paths_without_best(tree, EMBEDDINGS, 1, 0), tree.paths(EMBEDDINGS))
    blocked = [(1, 2)]
    assert torch.equal(paths_without_best(tree, EMBEDDINGS, 3, 0, blocked), tree.paths(EMBEDDINGS, blocked))


def test_nodes_of_level_1_are_left_out_from_the_nearest_on():
    tree = random_tree()
    order = torch.cdist(EMBEDDINGS, tree.centroids[0]).argsort(-1)
    for count in range(3):
        assert torch.equal(paths_without_best(tree, EMBEDDINGS, 1, count)[:, 0], order[:, count])


@pytest.mark.parametrize("level", [2, 3])
def test_deeper_nodes_are_left_out_as_a_text_comes_to_them(level):
    """Each by itself: what its own paths took before, and nothing else, is blocked."""
    tree = random_tree()
    for row in EMBEDDINGS[:8].split(1):
        taken: list[tuple[int, int]] = [(1, 0)]
        for count in range(5):
            expected = tree.paths(row, taken)
            assert torch.equal(paths_without_best(tree, row, level, count, [(1, 0)]), expected)
            taken.append((level, int(expected[0, level - 1])))
    together = paths_without_best(tree, EMBEDDINGS, level, 4)
    assert torch.equal(together, torch.cat([paths_without_best(tree, row, level, 4) for row in EMBEDDINGS.split(1)]))


@pytest.mark.parametrize(
    ("level", "count", "message"),
    [
        (0, 1, r"best nodes are to be blocked at level 0; expected a level from 1 to 3\."),
        (4, 1, r"best nodes are to be blocked at level 4; expected a level from 1 to 3\."),
        (1, 3, r"blocked leaves no path to a leaf with data; .* Block fewer nodes\."),
        (2, 9, r"blocked leaves no path to a leaf with data; .* Block fewer nodes\."),
    ],
)
def test_what_cannot_be_blocked_is_refused(level, count, message):
    with pytest.raises(ValueError, match=message):
        paths_without_best(random_tree(), EMBEDDINGS, level, count)
