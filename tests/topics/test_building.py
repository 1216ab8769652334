"""Trees of synthetic topics: nested, the same for the same seed, what greedy descent finds again; clusters of a node are balanced."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midus_hf.topics import building
from midus_hf.topics.building import BALANCE, TreeOptions, balanced, build_tree, kmeans, topic_tree, unit_rows
from midus_hf.topics.tree import TreeOrigin

OPTIONS = TreeOptions(branching=3, levels=2, samples=60)
LEAST = {"branching": 2, "levels": 1, "steps": 1, "seed": 0, "samples": 32}


def nested_topics(each: int = 30, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of three topics with three subtopics each, not of length 1, shuffled; and the subtopic of each."""
    rng = np.random.default_rng(seed)
    topics = 4 * rng.normal(size=(3, 1, 12))
    centres = (topics + rng.normal(size=(3, 3, 12))).reshape(9, 12)
    labels = rng.permutation(np.repeat(np.arange(9), each))
    return (centres[labels] + 0.1 * rng.normal(size=(len(labels), 12))).astype(np.float32), labels


def test_topics_and_subtopics_are_found():
    (rows, labels), done = nested_topics(), []
    built = build_tree(rows.astype(np.float16), OPTIONS, progress=done.append)
    assert sum(done) == 2 * 270, "progress is told of every row at every level"
    assert len({*zip(built.leaves.tolist(), labels.tolist(), strict=True)}) == 9
    assert len({*zip((built.leaves // 3).tolist(), (labels // 3).tolist(), strict=True)}) == 3
    assert [level.tolist() for level in built.tree.sizes] == [[90] * 3, [30] * 9]


def test_leaves_are_where_greedy_descent_ends():
    rows = np.random.default_rng(0).normal(size=(700, 6)).astype(np.float32)
    options = TreeOptions(branching=4, levels=3, steps=3, samples=100)
    built = build_tree(rows, options)
    paths = built.tree.paths(unit_rows(rows, slice(None)))
    assert np.array_equal(paths[:, -1].numpy(), built.leaves)
    for level, sizes in enumerate(built.tree.sizes):
        assert torch.equal(paths[:, level].bincount(minlength=4 ** (level + 1)), sizes)
        assert torch.equal(sizes == 0, built.tree.centroids[level].isnan().all(-1))


def test_min_similarity_lets_99_of_100_rows_in():
    rows = nested_topics(each=50)[0]
    tree = build_tree(rows, OPTIONS).tree
    far = (tree.similarity(unit_rows(rows, slice(None))) < tree.min_similarity).float().mean().item()
    assert 0 <= far <= 0.01
    assert (tree.similarity(-unit_rows(rows, slice(None))) < tree.min_similarity).all()
    few = build_tree(rows[:20], OPTIONS).tree
    assert (few.similarity(unit_rows(rows[:20], slice(None))) >= few.min_similarity).all(), "the least of a few rows"


def test_given_nodes_have_the_means_of_their_rows():
    rows, labels = nested_topics()
    held_out = np.arange(len(rows)) % 10 == 0
    paths = np.stack([labels // 3, labels // 3 * 4 + labels % 3], axis=1)  # a tree of 4 children, 3 of them there
    built = topic_tree(rows, paths, 4, TreeOrigin(seed=0), held_out)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    for level, nodes in enumerate(paths.T):
        for node, centroid in enumerate(built.tree.centroids[level].numpy()):
            members = (nodes == node) & ~held_out
            assert built.tree.sizes[level][node] == (nodes == node).sum()
            if members.any():
                np.testing.assert_allclose(centroid, unit[members].mean(0), atol=1e-6)
            else:
                assert np.isnan(centroid).all()
    assert np.array_equal(built.tree.paths(unit_rows(rows, slice(None))).numpy(), paths)
    assert np.array_equal(built.leaves, paths[:, -1])


@pytest.mark.parametrize("stretch", [1, 64])
def test_same_seed_gives_the_same_tree(stretch, monkeypatch, tmp_path):
    rows = np.random.default_rng(0).normal(size=(500, 6)).astype(np.float32)
    options = TreeOptions(branching=4, levels=3, steps=3, samples=64, seed=5)
    first = build_tree(rows, options)
    np.save(tmp_path / "rows.npy", rows)
    monkeypatch.setattr(building, "_STRETCH", stretch)
    again = build_tree(np.load(tmp_path / "rows.npy", mmap_mode="r"), options)
    assert again.tree.fingerprint == first.tree.fingerprint
    assert np.array_equal(again.leaves, first.leaves)
    assert first.tree.origin.seed == 5
    other = build_tree(rows, TreeOptions(branching=4, levels=3, steps=3, samples=64, seed=6))
    assert other.tree.fingerprint != first.tree.fingerprint


@pytest.mark.parametrize(("members", "clusters"), [(1, 1), (3, 1), (4, 2), (7, 3), (9, 4), (40, 4)])
def test_small_nodes_make_fewer_clusters(members, clusters):
    rows = np.random.default_rng(1).normal(size=(members, 5)).astype(np.float32)
    tree = build_tree(rows, TreeOptions(branching=4, levels=2, samples=50)).tree
    assert (~tree.centroids[0].isnan().any(-1)).sum() <= clusters
    assert tree.sizes[0].sum() == tree.sizes[1].sum() == members
    if clusters == 1:
        assert tree.sizes[0].tolist() == [members, 0, 0, 0]
        expected = unit_rows(rows, slice(None)).mean(0)
        torch.testing.assert_close(tree.centroids[0][0], expected)
    alike = build_tree(np.ones((members, 3), np.float32), TreeOptions(branching=4, levels=2, samples=20)).tree
    assert sorted(alike.sizes[1].tolist()) == [0] * 15 + [members]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({key: low - 1}, f"{key} is {low - 1}; expected at least {low}") for key, low in LEAST.items()),
        ({"levels": 7}, "branching 16 and levels 7 make 268,435,456 leaves; expected at most 16,777,216"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TreeOptions(**options)


def test_unclusterable_rows_are_refused():
    with pytest.raises(ValueError, match="no rows; expected at least 1"):
        build_tree(np.zeros((0, 4), np.float32), TreeOptions())
    for value in (0, np.nan, np.inf):
        with pytest.raises(ValueError, match="of length 0 or with values that are not finite"):
            build_tree(np.full((9, 4), value, np.float32), TreeOptions())


def sizes_by_hand(sizes: list[int], limit: float) -> list[int]:
    """Appendix C: as long as a cluster is larger than the limit, the largest and the smallest become as large as one another."""
    sizes = list(sizes)
    while max(sizes) > limit and max(sizes) - min(sizes) > 1:
        largest, smallest = sizes.index(max(sizes)), sizes.index(min(sizes))
        both = sizes[largest] + sizes[smallest]
        sizes[smallest] = both // 2
        sizes[largest] = both - both // 2
    return sizes


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=16).filter(any), seed=st.integers(0, 99))
@example(sizes=[600, *[387] * 10, *[386] * 5], seed=0)  # the paper's limit of 16 clusters of 6400 samples
@example(sizes=[601, *[387] * 9, *[386] * 6], seed=0)
@example(sizes=[6400, *[0] * 15], seed=0)
@example(sizes=[1, 0], seed=0)  # what cannot be split
def test_clusters_have_the_sizes_of_the_rule(sizes, seed):
    before = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    after = balanced(before, len(sizes), np.random.default_rng(seed))
    limit = BALANCE / len(sizes) * len(before)
    assert np.bincount(after, minlength=len(sizes)).tolist() == sizes_by_hand(sizes, limit)
    assert max(sizes) > limit or np.array_equal(after, before)
    assert np.array_equal(after, balanced(before, len(sizes), np.random.default_rng(seed)))


def test_steps_are_fresh_and_balanced(monkeypatch):
    """Nine in ten rows are about one thing."""
    generator = torch.Generator().manual_seed(0)
    narrow = torch.randn(1, 12, generator=generator) + 0.02 * torch.randn(1800, 12, generator=generator)
    rows = torch.nn.functional.normalize(torch.cat([narrow, torch.randn(200, 12, generator=generator)]), dim=-1)
    drawn, steps = [], []

    def sample(number: int, rng: np.random.Generator) -> torch.Tensor:
        drawn.append(rng.choice(len(rows), number, replace=False))
        return rows[drawn[-1]]

    def watched(assigned: np.ndarray, num_clusters: int, rng: np.random.Generator) -> np.ndarray:
        steps.append((assigned, balanced(assigned, num_clusters, rng)))
        return steps[-1][1]

    monkeypatch.setattr(building, "balanced", watched)
    centroids = kmeans(sample, 16, 20, 640, np.random.default_rng(0))
    assert len(steps) == 20
    assert all(len(set(places.tolist())) == 640 for places in drawn)
    assert len({tuple(np.sort(places)) for places in drawn}) == 21, "fresh for each step, and for the initialisation"
    sizes = [[np.bincount(assigned, minlength=16) for assigned in step] for step in steps]
    assert sum(before.max() > 60 for before, _ in sizes) > 1, "the rule has something to do"
    assert all(after.tolist() == sizes_by_hand(before.tolist(), 60) for before, after in sizes)
    rows_of_last, last = rows[drawn[-1]].double(), steps[-1][1]
    expected = torch.stack([rows_of_last[last == cluster].mean(0) for cluster in range(16)])
    torch.testing.assert_close(centroids, expected.float())
    uneven = np.repeat([0, 1], [30, 2])
    one, other = (balanced(uneven, 2, np.random.default_rng(seed)) for seed in (0, 1))
    assert not np.array_equal(one, other), "rows that move are drawn"
