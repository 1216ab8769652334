"""A clustering that was interrupted goes on at the node it was at, and ends in the tree of one that was not."""

import numpy as np
import pytest
import torch

from midus_hf.topics import building
from midus_hf.topics.building import TreeOptions, build_tree
from midus_hf.topics.finished_nodes import FinishedNodes

OPTIONS = TreeOptions(branching=4, levels=3, steps=3, samples=64)
# That have children, and members enough to have several.
NODES = 1 + 4 + 16


def rows(number: int = 900) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(number, 6)).astype(np.float32)


def nodes_in(folder, fingerprint="same") -> FinishedNodes:
    return FinishedNodes(folder, fingerprint, 4, 6, 900)


def assert_equal_trees(first, second) -> None:
    assert first.tree.fingerprint == second.tree.fingerprint and np.array_equal(first.leaves, second.leaves)
    assert all(torch.equal(one, other) for one, other in zip(first.tree.sizes, second.tree.sizes, strict=True))


@pytest.mark.parametrize("calls", [0, 1, 3, 12, NODES - 1])
def test_a_killed_clustering_goes_on_at_the_node_it_was_at(tmp_path, interrupted, monkeypatch, calls):
    whole = build_tree(rows(), OPTIONS)
    killed = nodes_in(tmp_path)  # stays open: what it has not written yet would be lost with its process
    with interrupted(calls, building, "kmeans"):
        build_tree(rows(), OPTIONS, finished=killed)
    kmeans, done, progress = building.kmeans, [], []
    monkeypatch.setattr(building, "kmeans", lambda *given: done.append(None) or kmeans(*given))
    again = build_tree(rows(), OPTIONS, progress=progress.append, finished=nodes_in(tmp_path))
    assert_equal_trees(again, whole)
    assert len(done) == NODES - calls, "no finished node is clustered again"
    assert sum(progress) == 3 * 900
    killed.close()


def test_rows_of_a_finished_level_are_not_assigned_again(tmp_path, interrupted, monkeypatch):
    whole = build_tree(rows(), OPTIONS)
    with interrupted(7, building, "kmeans"):  # in the third level
        build_tree(rows(), OPTIONS, finished=nodes_in(tmp_path))
    assign, assigned = building.assign_rows, []
    monkeypatch.setattr(building, "assign_rows", lambda *given: assigned.append(len(given[2])) or assign(*given))
    assert_equal_trees(build_tree(rows(), OPTIONS, finished=nodes_in(tmp_path)), whole)
    assert sum(assigned) == 900


def test_what_is_half_written_or_altered_is_clustered_again(tmp_path):
    whole = build_tree(rows(), OPTIONS, finished=nodes_in(tmp_path))
    file = tmp_path / "centroids.bin"
    content = file.read_bytes()
    size = len(content) // NODES
    (tmp_path / "nodes.3.npy").unlink()
    for found, kept in ((content[:-1], NODES - 1), (content + b"half", NODES), (b"", 0)):
        file.write_bytes(found)
        finished = nodes_in(tmp_path)
        assert file.stat().st_size == kept * size
        finished.close()
    changed = bytearray(content)
    changed[4 * size + 40] ^= 1
    file.write_bytes(changed)
    finished = nodes_in(tmp_path)
    assert finished.centroids(2, 2) is not None and finished.centroids(2, 3) is None
    assert_equal_trees(build_tree(rows(), OPTIONS, finished=finished), whole)


def test_nodes_of_something_else_are_not_taken(tmp_path):
    build_tree(rows(), OPTIONS, finished=nodes_in(tmp_path))
    assert nodes_in(tmp_path).centroids(1, 0) is not None and nodes_in(tmp_path).nodes(3) is not None
    assert FinishedNodes(tmp_path, "same", 4, 6, 899).nodes(1) is None, "of as many rows alone"
    other = nodes_in(tmp_path, "other")
    assert other.centroids(1, 0) is None and other.nodes(1) is None
    (tmp_path / "clustering.json").write_text("{")
    assert nodes_in(tmp_path, "other").centroids(1, 0) is None


def test_nodes_of_levels_follow_from_the_last(tmp_path):
    finished = nodes_in(tmp_path)
    assert finished.nodes(1) is None
    last = np.arange(900) % 64
    finished.finish_level(2, last // 4)
    finished.finish_level(3, last)
    assert [path.name for path in tmp_path.glob("nodes.*")] == ["nodes.3.npy"]
    again = nodes_in(tmp_path)
    assert [again.nodes(level).tolist() for level in (1, 2, 3)] == [
        (last // 4 ** (3 - level)).tolist() for level in (1, 2, 3)
    ]
    assert again.nodes(4) is None
    again.delete()
    assert not tmp_path.exists()


def test_parts_of_different_numbers_of_tasks_are_joined(tmp_path):
    """A run of two tasks was killed after its first, and one of three did all."""
    nodes = np.arange(900, dtype=np.int64) % 4
    finished = nodes_in(tmp_path)
    for first, end in ((0, 450), (0, 300), (300, 600), (600, 900)):
        finished.add_part(1, first, nodes[first:end])
    assert np.array_equal(finished.nodes(1), nodes)
