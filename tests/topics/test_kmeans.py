"""Clusters of one node: balanced by the rule, and where the data is."""

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midus_hf.topics import building as module
from midus_hf.topics.building import BALANCE, balanced, kmeans


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


def test_the_members_that_move_are_drawn_from_the_largest_cluster():
    before = np.repeat([0, 1, 2, 3], [60, 10, 16, 14])
    after = balanced(before, 4, np.random.default_rng(0))
    moved = after != before
    assert moved.sum() == 25 and (before[moved] == 0).all() and (after[moved] == 1).all()
    assert not np.array_equal(*(balanced(before, 4, np.random.default_rng(seed)) for seed in (0, 1)))


def test_twenty_steps_of_6400_fresh_samples_are_each_balanced_where_that_must_be(monkeypatch):
    """The paper's numbers, on rows of which nine in ten are about one thing."""
    generator = torch.Generator().manual_seed(0)
    narrow = torch.randn(1, 12, generator=generator) + 0.02 * torch.randn(18000, 12, generator=generator)
    spread = torch.randn(2000, 12, generator=generator)
    rows = torch.nn.functional.normalize(torch.cat([narrow, spread]), dim=-1)
    drawn: list[np.ndarray] = []
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    balance = module.balanced

    def sample(number: int, rng: np.random.Generator) -> torch.Tensor:
        drawn.append(rng.choice(len(rows), number, replace=False))
        return rows[drawn[-1]]

    def watched(assigned: np.ndarray, num_clusters: int, rng: np.random.Generator) -> np.ndarray:
        after = balance(assigned, num_clusters, rng)
        steps.append((assigned, after))
        return after

    monkeypatch.setattr(module, "balanced", watched)
    centroids = kmeans(sample, 16, 20, 6400, np.random.default_rng(0))
    assert len(steps) == 20 and all(len(places) == len(set(places.tolist())) == 6400 for places in drawn)
    assert len({tuple(np.sort(places)) for places in drawn}) == 21, "fresh for each step, and for the initialisation"
    triggered = 0
    for before, after in steps:
        sizes, balanced_sizes = (np.bincount(assigned, minlength=16) for assigned in (before, after))
        assert balanced_sizes.tolist() == sizes_by_hand(sizes.tolist(), 600) and balanced_sizes.max() <= 600
        triggered += sizes.max() > 600
    assert triggered > 1, "the rule has something to do"
    rows_of_last, last = rows[drawn[-1]].double(), steps[-1][1]
    expected = torch.stack([rows_of_last[last == cluster].mean(0) for cluster in range(16)])
    torch.testing.assert_close(centroids, expected.float())
