"""Clusters of one node: balanced by the rule, and where the data is."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters.kmeans import BALANCE, balanced, kmeans, nearest


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
