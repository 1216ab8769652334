"""Paths are those of a loop that looks at one text and one child at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from topics.trees import random_tree

from midus_hf.topics.tree import ClusterTree


def leads_to_a_leaf(tree: ClusterTree, level: int, node: int) -> bool:
    if math.isnan(tree.centroids[level - 1][node, 0]):
        return False
    children = [tree.branching * node + digit for digit in range(tree.branching)]
    return level == tree.levels or any(leads_to_a_leaf(tree, level + 1, child) for child in children)


def path_by_hand(tree: ClusterTree, embedding: torch.Tensor) -> list[int]:
    node, path = 0, []
    for level in range(1, tree.levels + 1):
        distances = {
            child: math.dist(embedding.tolist(), tree.centroids[level - 1][child].tolist())
            for child in range(tree.branching * node, tree.branching * (node + 1))
            if leads_to_a_leaf(tree, level, child)
        }
        node = min(distances, key=distances.__getitem__)
        path.append(node)
    return path


@settings(max_examples=40)
@given(data=st.data(), branching=st.integers(2, 4), levels=st.integers(1, 3), seed=st.integers(0, 99))
def test_paths_are_greedy_and_avoid_what_is_empty(data, branching, levels, seed):
    nodes = [(level, node) for level in range(1, levels + 1) for node in range(branching**level)]
    leaf = data.draw(st.integers(0, branching**levels - 1))
    kept = {(level, leaf // branching ** (levels - level)) for level in range(1, levels + 1)}
    empty = [node for node in data.draw(st.lists(st.sampled_from(nodes), max_size=4, unique=True)) if node not in kept]
    tree = random_tree(branching, levels, seed=seed, empty=tuple(empty))
    embeddings = torch.randn(20, 5, generator=torch.Generator().manual_seed(seed + 1))
    assert tree.paths(embeddings).tolist() == [path_by_hand(tree, embedding) for embedding in embeddings]


def test_a_tree_without_a_node_sends_no_text_there_and_leaves_all_others_as_they_are(tmp_path):
    sizes = [torch.full((3**level,), 3 ** (3 - level)) for level in (1, 2, 3)]
    tree = random_tree(3, 3, sizes=sizes, min_similarity=0.1, grown_from=["older"])
    embeddings = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))
    before = tree.paths(embeddings)
    after = tree.without([(1, 2), (2, 1)])
    gone = [{2}, {1, 6, 7, 8}, {3, 4, 5, *range(18, 27)}]
    for level, nodes in enumerate(gone):
        stay = [node for node in range(3 ** (level + 1)) if node not in nodes]
        assert torch.equal(after.centroids[level][stay], tree.centroids[level][stay])
        assert after.centroids[level][sorted(nodes)].isnan().all()
        assert not after.sizes[level][sorted(nodes)].any() and torch.equal(
            after.sizes[level][stay], sizes[level][stay]
        )
        assert not set(after.paths(embeddings)[:, level].tolist()) & nodes
    elsewhere = (before[:, 0] != 2) & (before[:, 1] != 1)
    assert torch.equal(after.paths(embeddings)[elsewhere], before[elsewhere]) and 0 < elsewhere.sum() < 200
    assert (after.min_similarity, after.grown_from) == (0.1, ("older", tree.fingerprint))
    assert after.fingerprint not in (tree.fingerprint, "older")
    after.save(tmp_path)
    assert torch.equal(ClusterTree.load(tmp_path).paths(embeddings), after.paths(embeddings))
    assert tree.without([(1, 0), (1, 1), (2, 6), (2, 7), (2, 8)]) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_paths_do_not_depend_on_what_descends_along(dtype):
    tree = random_tree(4, 3)
    embeddings = torch.randn(700, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    paths = tree.paths(embeddings)
    assert paths.dtype == torch.int64 and paths.shape == (700, 3)
    for size in (1, 7, 256):
        assert torch.equal(torch.cat([tree.paths(rows) for rows in embeddings.split(size)]), paths)
    assert tree.paths(embeddings[:0]).shape == (0, 3)


def test_equally_near_children_give_the_first_and_what_is_not_finite_is_refused():
    tree = ClusterTree(3, [torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])])
    assert tree.paths(torch.tensor([[0.3, 0.3], [0.0, 1.0]])).tolist() == [[0], [1]]
    with pytest.raises(ValueError, match=r"embeddings have values that are not finite; expected numbers"):
        tree.paths(torch.full((1, 2), torch.nan))


def test_the_fingerprint_is_that_of_branching_and_centroids():
    tree, same, other = random_tree(), random_tree(), random_tree(seed=1)
    assert tree.fingerprint == same.fingerprint != other.fingerprint
    assert len(tree.fingerprint) == 64 and int(tree.fingerprint, 16)
    rows = torch.randn(16, 1)
    wide, narrow = ClusterTree(16, [rows]), ClusterTree(4, [rows[:4], rows])
    assert wide.fingerprint != narrow.fingerprint
    halves = [torch.tensor([[0.0, torch.nan], [1.0, 1.0]]), torch.tensor([[torch.nan, 5.0], [1.0, 1.0]])]
    empty, too = (ClusterTree(2, [half]).fingerprint for half in halves)
    assert empty == too, "an empty node has no value"


@pytest.mark.parametrize(
    ("branching", "centroids", "message"),
    [
        (1, [torch.zeros(1, 2)], r"branching is 1; expected at least 2 children of a node\."),
        (2, [torch.zeros(2, 3), torch.zeros(5, 3)], r"of level 2 have the shape \(5, 3\); expected \(4, 3\), a row"),
        (2, [torch.zeros(2, 3), torch.zeros(4, 2)], r"of level 2 have the shape \(4, 2\); expected \(4, 3\)"),
        (2, [torch.tensor([[1.0], [torch.inf]])], r"centroids have infinite values; expected finite ones"),
        (2, [torch.tensor([[1.0], [torch.nan]]), torch.tensor([[torch.nan]] * 2 + [[1.0]] * 2)], r"NaN on every way to a"),
    ],
)  # fmt: skip
def test_centroids_that_make_no_tree_are_refused(branching, centroids, message):
    with pytest.raises(ValueError, match=message):
        ClusterTree(branching, centroids)
    with pytest.raises(ValueError, match=r"sizes do not fit centroids; expected a"):
        ClusterTree(2, [torch.zeros(2, 1)], sizes=[torch.zeros(3)])
