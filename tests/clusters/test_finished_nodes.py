"""A clustering that was interrupted goes on at the node it was at, and ends in the tree of one that was not."""

import os
from pathlib import Path

import numpy as np
import torch
from processes.warm import run_warm

from midus_hf.clusters import building
from midus_hf.clusters.building import TreeOptions, build_tree
from midus_hf.clusters.finished_nodes import FinishedNodes

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


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from midus_hf.clusters import building
from midus_hf.clusters.finished_nodes import FinishedNodes
sys.path.insert(0, sys.argv[1])
from test_finished_nodes import OPTIONS, nodes_in, rows

kmeans = building.kmeans
for calls in map(int, sys.argv[3:]):
    child = os.fork()
    if not child:
        done = []
        def killed(*given):
            if len(done) == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(None)
            return kmeans(*given)
        building.kmeans = killed
        building.build_tree(rows(), OPTIONS, finished=nodes_in(Path(sys.argv[2], str(calls))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


def test_a_killed_clustering_goes_on_at_the_node_it_was_at(tmp_path, monkeypatch):
    whole = build_tree(rows(), OPTIONS)
    calls = [0, 1, 3, 12, NODES - 1]
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parents[1]), str(here.parent)])
    run = run_warm(KILLED, here, tmp_path, *calls, PYTHONPATH=paths)
    assert run.returncode == 0, run.stderr
    kmeans, done = building.kmeans, []
    monkeypatch.setattr(building, "kmeans", lambda *given: done.append(None) or kmeans(*given))
    for number in calls:
        done.clear()
        finished, told = nodes_in(tmp_path / str(number)), []
        assert_equal_trees(build_tree(rows(), OPTIONS, progress=told.append, finished=finished), whole)
        assert len(done) == NODES - number, "no finished node is clustered again"
        assert sum(told) == 3 * 900
        finished.close()


def test_rows_of_a_finished_level_are_not_assigned_again(tmp_path, interrupted, monkeypatch):
    whole = build_tree(rows(), OPTIONS)
    with interrupted(7, building, "kmeans"):  # in the third level
        build_tree(rows(), OPTIONS, finished=nodes_in(tmp_path))
    nearest, assigned = building.nearest, []
    monkeypatch.setattr(building, "nearest", lambda given, found: assigned.append(len(given)) or nearest(given, found))
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
