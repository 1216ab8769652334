"""K-means of one node: k-means++ initialisation, and EM on fresh samples whose clusters are kept from growing too large."""

from collections.abc import Callable

import numpy as np
import torch

from midus_hf.retrieval.cluster_tree import squared_distances

BALANCE = 1.5
"""A cluster may have this multiple of the mean share of a step's samples."""

Sampler = Callable[[int, np.random.Generator], torch.Tensor]
"""Draws up to so many rows, `[n, c]` float32 of length 1, without replacement."""


def kmeans(sample: Sampler, num_clusters: int, steps: int, samples: int, rng: np.random.Generator) -> torch.Tensor:
    """Find centroids by expectation maximisation.

    A step assigns a fresh sample to its nearest centroids, balances the clusters, and makes each centroid the mean of what
    it was assigned; a centroid that was assigned nothing stays.

    Args:
        sample: Draws from what is to be clustered.
        num_clusters: At least 1, and at most the rows that there are.
        steps: Steps after the initialisation.
        samples: Rows of the initialisation and of each step.
        rng: Decides everything that is random.

    Returns:
        `[num_clusters, c]` float32.
    """
    from sklearn.cluster import kmeans_plusplus

    first = sample(samples, rng).double()
    assert len(first) >= num_clusters, f"{len(first)} rows cannot make {num_clusters} clusters"
    chosen, _ = kmeans_plusplus(first.numpy(), num_clusters, random_state=int(rng.integers(2**31)))
    centroids = torch.from_numpy(chosen)
    for _ in range(steps):
        rows = sample(samples, rng)
        assigned = balanced(nearest(rows, centroids).numpy(), num_clusters, rng)
        members = torch.nn.functional.one_hot(torch.from_numpy(assigned), num_clusters).double()  # [n, k]
        counts = members.sum(0).unsqueeze(-1)
        centroids = torch.where(counts > 0, members.T @ rows.double() / counts.clamp(min=1), centroids)
    return centroids.float()


def nearest(rows: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The nearest centroid of each row, the first of those that are equally near; as a tree's greedy descent takes it.

    Args:
        rows: `[n, c]`.
        centroids: `[k, c]`.

    Returns:
        `[n]` int64.
    """
    return squared_distances(rows, centroids).argmin(-1)


def balanced(assigned: np.ndarray, num_clusters: int, rng: np.random.Generator) -> np.ndarray:
    """Split the largest cluster evenly with the smallest one, as long as it has more than its share.

    So many of its assignments, drawn at random, go to the smallest cluster that both end up equally large. The share is
    `BALANCE / num_clusters`; afterwards no cluster has more, but by the one assignment that cannot be split.

    Args:
        assigned: The cluster of each sample, `[n]` int64.
        num_clusters: The number of clusters.
        rng: Draws the assignments that move.

    Returns:
        `[n]` int64.
    """
    assigned = assigned.copy()
    sizes = np.bincount(assigned, minlength=num_clusters)
    limit = BALANCE / num_clusters * len(assigned)
    while sizes.max() > limit:
        largest, smallest = int(sizes.argmax()), int(sizes.argmin())
        moving = int(sizes[largest] - sizes[smallest]) // 2
        if moving == 0:
            break
        members = np.flatnonzero(assigned == largest)
        assigned[rng.choice(members, moving, replace=False)] = smallest
        sizes[largest] -= moving
        sizes[smallest] += moving
    return assigned
