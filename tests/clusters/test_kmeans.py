"""Clusters of one node: balanced by the rule, and where the data is."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midus_hf.clusters import kmeans as module
from midus_hf.clusters.kmeans import BALANCE, balanced, kmeans, nearest


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_clusters=st.integers(1, 16), seed=st.integers(0, 99))
def test_no_cluster_keeps_more_than_its_share(data, num_clusters, seed):
    given_ = np.array(data.draw(st.lists(st.integers(0, num_clusters - 1), min_size=1, max_size=200)))
    after = balanced(given_, num_clusters, np.random.default_rng(seed))
    sizes, before = (np.bincount(clusters, minlength=num_clusters) for clusters in (after, given_))
    limit = BALANCE / num_clusters * len(given_)
    assert sizes.max() <= max(limit, sizes.min() + 1)
    if before.max() <= limit:
        assert np.array_equal(after, given_), "what is not too large stays"


def test_the_largest_and_the_smallest_are_made_equal_and_others_stay():
    given_ = np.repeat([0, 1, 2, 3], [60, 10, 16, 14])
    after = balanced(given_, 4, np.random.default_rng(0))
    assert np.bincount(after).tolist() == [35, 35, 16, 14]
    moved = np.flatnonzero(after != given_)
    assert (given_[moved] == 0).all() and (after[moved] == 1).all()
    assert not np.array_equal(after, balanced(given_, 4, np.random.default_rng(1))), "which of them move is random"
    assert np.array_equal(after, balanced(given_, 4, np.random.default_rng(0)))


def topics(count: int, each: int, width: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors around so many random directions, and the direction of each."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(torch.randn(count, width, generator=generator), dim=-1)
    labels = torch.arange(count).repeat_interleave(each)
    rows = centres[labels] + 0.05 * torch.randn(count * each, width, generator=generator)
    return torch.nn.functional.normalize(rows, dim=-1), labels


@pytest.mark.parametrize("samples", [80, 1000])
def test_topics_are_found(samples):
    rows, labels = topics(5, 40)

    def sample(number: int, rng: np.random.Generator) -> torch.Tensor:
        return rows[np.sort(rng.choice(len(rows), min(number, len(rows)), replace=False))]

    centroids = kmeans(sample, 5, 20, samples, np.random.default_rng(0))
    assert centroids.dtype == torch.float32 and centroids.shape == (5, 8)
    assert len({*zip(nearest(rows, centroids).tolist(), labels.tolist(), strict=True)}) == 5
    if samples == 1000:  # every step sees all: centroids are means
        expected = torch.stack([rows[nearest(rows, centroids) == cluster].mean(0) for cluster in range(5)])
        torch.testing.assert_close(centroids, expected)


def test_the_samples_of_every_step_are_drawn_anew():
    rows, _ = topics(3, 100)
    asked: list[int] = []

    def sample(number: int, rng: np.random.Generator) -> torch.Tensor:
        asked.append(number)
        return rows[rng.choice(len(rows), number, replace=False)]

    kmeans(sample, 3, 7, 50, np.random.default_rng(0))
    assert asked == [50] * 8, "one for the initialisation, one for each step"


def sizes_by_hand(sizes: list[int], limit: float) -> list[int]:
    """Appendix C: as long as a cluster is larger than the limit, the largest and the smallest become as large as one another."""
    sizes = list(sizes)
    while max(sizes) > limit:
        largest, smallest = sizes.index(max(sizes)), sizes.index(min(sizes))
        both = sizes[largest] + sizes[smallest]
        sizes[smallest] = both // 2
        sizes[largest] = both - both // 2
    return sizes


@pytest.mark.parametrize(("largest", "splits"), [(600, False), (601, True)], ids=["at-the-limit", "above-it"])
def test_the_limit_of_16_clusters_of_6400_samples_is_600(largest, splits):
    rest = np.full(15, (6400 - largest) // 15)
    rest[: 6400 - largest - rest.sum()] += 1
    given_ = np.repeat(np.arange(16), [largest, *rest])
    after = balanced(given_, 16, np.random.default_rng(0))
    assert np.array_equal(after, given_) != splits
    assert np.bincount(after).tolist() == sizes_by_hand([largest, *rest], 0.09375 * 6400)


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
    monkeypatch.setattr(module, "BALANCE", 16.0)
    alone = kmeans(sample, 16, 20, 6400, np.random.default_rng(0))
    largest = [np.bincount(nearest(rows, found), minlength=16).max() for found in (centroids, alone)]
    assert largest[0] < largest[1], "what the rule is for"


def test_splitting_ends_for_the_most_uneven_assignments():
    for samples in (32, 100, 6400):
        after = balanced(np.zeros(samples, np.int64), 16, np.random.default_rng(0))
        assert np.bincount(after, minlength=16).tolist() == sizes_by_hand([samples, *[0] * 15], 0.09375 * samples)
