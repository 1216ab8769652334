"""Paths are those of a loop over texts and children; a saved tree is read as it was, and a file that is not as it was is refused."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from topics.trees import random_tree

from midus_hf.topics.tree import ClusterTree, TreeOrigin


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
def test_paths_are_greedy_and_avoid_empty_nodes(data, branching, levels, seed):
    nodes = [(level, node) for level in range(1, levels + 1) for node in range(branching**level)]
    leaf = data.draw(st.integers(0, branching**levels - 1))
    kept = {(level, leaf // branching ** (levels - level)) for level in range(1, levels + 1)}
    empty = [node for node in data.draw(st.lists(st.sampled_from(nodes), max_size=4, unique=True)) if node not in kept]
    tree = random_tree(branching, levels, seed=seed, empty=tuple(empty))
    embeddings = torch.randn(20, 5, generator=torch.Generator().manual_seed(seed + 1))
    assert tree.paths(embeddings).tolist() == [path_by_hand(tree, embedding) for embedding in embeddings]


def test_node_removal_keeps_other_paths(tmp_path):
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
        assert not after.sizes[level][sorted(nodes)].any()
        assert torch.equal(after.sizes[level][stay], sizes[level][stay])
        assert not set(after.paths(embeddings)[:, level].tolist()) & nodes
    elsewhere = (before[:, 0] != 2) & (before[:, 1] != 1)
    assert torch.equal(after.paths(embeddings)[elsewhere], before[elsewhere])
    assert 0 < elsewhere.sum() < 200
    assert (after.min_similarity, after.grown_from) == (0.1, ("older", tree.fingerprint))
    assert after.fingerprint not in (tree.fingerprint, "older")
    after.save(tmp_path)
    assert torch.equal(ClusterTree.load(tmp_path).paths(embeddings), after.paths(embeddings))
    assert tree.without([(1, 0), (1, 1), (2, 6), (2, 7), (2, 8)]) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_paths_do_not_depend_on_the_batch(dtype):
    tree = random_tree(4, 3)
    embeddings = torch.randn(700, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    paths = tree.paths(embeddings)
    assert (paths.dtype, paths.shape) == (torch.int64, (700, 3))
    for size in (1, 7, 256):
        assert torch.equal(torch.cat([tree.paths(rows) for rows in embeddings.split(size)]), paths)
    assert tree.paths(embeddings[:0]).shape == (0, 3)


def test_first_of_equally_near_children_is_taken():
    tree = ClusterTree(3, [torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])])
    assert tree.paths(torch.tensor([[0.3, 0.3], [0.0, 1.0]])).tolist() == [[0], [1]]
    with pytest.raises(ValueError, match=r"embeddings have values that are not finite; expected numbers"):
        tree.paths(torch.full((1, 2), torch.nan))


def test_fingerprint_is_of_branching_and_centroids():
    tree, same, other = random_tree(), random_tree(), random_tree(seed=1)
    assert tree.fingerprint == same.fingerprint != other.fingerprint
    assert len(tree.fingerprint) == 64
    assert int(tree.fingerprint, 16)
    rows = torch.randn(16, 1)
    wide, narrow = ClusterTree(16, [rows]), ClusterTree(4, [rows[:4], rows])
    assert wide.fingerprint != narrow.fingerprint
    halves = [torch.tensor([[0.0, torch.nan], [1.0, 1.0]]), torch.tensor([[torch.nan, 5.0], [1.0, 1.0]])]
    empty, too = (ClusterTree(2, [half]).fingerprint for half in halves)
    assert empty == too, "an empty node has no value"


@pytest.mark.parametrize(
    ("branching", "centroids", "message"),
    [
        (2, [torch.zeros(2, 3), torch.zeros(5, 3)], r"level 2 have the shape \(5, 3\); expected \(4, 3\)"),
        (2, [torch.zeros(2, 3), torch.zeros(4, 2)], r"level 2 have the shape \(4, 2\); expected \(4, 3\)"),
        (2, [torch.tensor([[1.0], [torch.inf]])], "infinite values; expected finite ones"),
        (2, [torch.tensor([[1.0], [torch.nan]]), torch.tensor([[torch.nan]] * 2 + [[1.0]] * 2)], "NaN on every path"),
    ],
)
def test_wrong_centroids_are_refused(branching, centroids, message):
    with pytest.raises(ValueError, match=message):
        ClusterTree(branching, centroids)
    with pytest.raises(ValueError, match="sizes do not fit centroids; expected a"):
        ClusterTree(2, [torch.zeros(2, 1)], sizes=[torch.zeros(3)])


LEAVES = torch.arange(9)
ORIGIN = TreeOrigin("model", "ab12", 256, "tokenizer", 2048, 7)
COUNTED = random_tree(3, 2, origin=ORIGIN, sizes=[LEAVES.unflatten(0, (3, 3)).sum(-1), LEAVES])


@pytest.fixture
def folder(tmp_path):
    COUNTED.save(tmp_path / "tree")
    return tmp_path / "tree"


def test_saved_tree_loads_as_it_was(folder):
    tree, again = COUNTED, ClusterTree.load(folder)
    assert (again.branching, again.levels, again.width) == (3, 2, 5)
    assert (again.origin, again.fingerprint) == (tree.origin, tree.fingerprint)
    assert all(torch.equal(*pair) for pair in zip(tree.centroids, again.centroids, strict=True))
    assert all(torch.equal(*pair) for pair in zip(tree.sizes, again.sizes, strict=True))
    assert sorted(path.name for path in folder.iterdir()) == ["tree.json", "tree.safetensors"]
    record = json.loads((folder / "tree.json").read_text())
    assert record == {
        **{"format_version": 2, "branching": 3, "levels": 2, "width": 5, "fingerprint": tree.fingerprint},
        **{"embedding_model": "model", "embedding_fingerprint": "ab12", "embedding_max_tokens": 256},
        **{"tokenizer": "tokenizer", "window_tokens": 2048, "seed": 7, "min_similarity": None},
        **{"topic_quantile": None, "topic_limits": None},
        **{"roots": 3, "grown_from": [], "sizes": [[3, 12, 21], list(range(9))]},
    }
    for key in ("min_similarity", "topic_quantile", "topic_limits"):
        del record[key]  # as versions before wrote it
    (folder / "tree.json").write_text(json.dumps(record))
    earlier = ClusterTree.load(folder)
    assert (earlier.min_similarity, earlier.topic_limits, earlier.origin) == (None, None, tree.origin)


def test_saved_tree_keeps_empty_nodes_and_hides_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "jane"))
    origin = TreeOrigin(embedding_model=str(tmp_path / "jane" / "bert"), tokenizer="org/name")
    for known in (origin, TreeOrigin()):
        tree = random_tree(empty=((1, 0), (3, 20)), min_similarity=0.25, origin=known)
        tree.save(tmp_path)
        again = ClusterTree.load(tmp_path)
        assert again.origin == known
        assert again.sizes is None
        assert again.fingerprint == tree.fingerprint
        assert again.centroids[0][0].isnan().all()
        assert again.centroids[2][20].isnan().all()
        assert again.min_similarity == 0.25
        assert random_tree(empty=((1, 0), (3, 20))).fingerprint == tree.fingerprint
        record = json.loads((tmp_path / "tree.json").read_text())
        assert record["embedding_model"] == ("~/bert" if known is origin else None)


ALTERED = r"tree' was altered or is not whole: "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"format_version": 1}, "its format_version is 1; expected 2"),
        *(({key: value}, "") for key, value in {"branching": "wide", "sizes": [[3, 12, 21], [[1], [2, 3]]]}.items()),
        ({"sizes": [[3, 12]]}, "sizes do not fit centroids"),
        ({"branching": 1e999}, ""),
        ({"fingerprint": "0"}, "the fingerprint of its centroids is not the one in tree.json"),
        ({"branching": 4}, "centroids of level 1"),
        *(
            ({"min_similarity": value}, f"min_similarity is {value!r}; expected a cosine")
            for value in (1.5, "0.2", True)
        ),
        ("{", ".*Copy it again, or build the tree again"),
        ("[" * 100_000, "it is nested too deeply"),
        ("[]", ""),
        ('{"format_version": 2, "branching": 3}', ""),
    ],
)
def test_altered_record_is_refused(folder, content, message):
    """Changed in some of its keys, or as a whole."""
    file = folder / "tree.json"
    file.write_text(content if isinstance(content, str) else json.dumps({**json.loads(file.read_text()), **content}))
    with pytest.raises(ValueError, match=message if "cosine" in message else f"{ALTERED}{message}"):
        ClusterTree.load(folder)


def test_altered_centroids_are_refused(folder):
    path = folder / "tree.safetensors"
    whole, tensors = path.read_bytes(), load_file(path)
    tensors["centroids.2"][0, 0] += 1e-6
    for content in (whole[:-4], whole[:20], b"", save(tensors), None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(ValueError, match=ALTERED):
            ClusterTree.load(folder)
    with pytest.raises(ValueError, match=r"absent', whose tree.json cannot be read .* midus cluster build or"):
        ClusterTree.load(folder / "absent")
