"""K-means of one node: k-means++ initialisation, then EM on fresh samples, with limits on the size of clusters."""

from collections.abc import Callable

import numpy as np
import torch

from midus_hf.retrieval.cluster_tree import squared_distances

# Largest size of a cluster in a step, as a multiple of the mean cluster size.
BALANCE = 1.5

# Function that draws up to a number of rows without replacement and returns `[n, c]`, float32, with rows of length 1.
Sampler = Callable[[int, np.random.Generator], torch.Tensor]


def kmeans(sample: Sampler, num_clusters: int, steps: int, samples: int, rng: np.random.Generator) -> torch.Tensor:
    """Compute centroids, `[num_clusters, c]`, float32, by expectation maximisation.

    Each step assigns a fresh sample to its nearest centroids, balances the clusters, and moves each centroid to the mean of
    its rows. A centroid without rows stays where it is.

    Args:
        num_clusters: Number of clusters, from 1 to the number of rows.
        steps: Steps after the initialisation.
        samples: Number of rows drawn for the initialisation and for each step.
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
    """Return the nearest of the centroids `[k, c]` of each row, `[n]`, int64; the first among equally near ones."""
    return squared_distances(rows, centroids).argmin(-1)


def balanced(assigned: np.ndarray, num_clusters: int, rng: np.random.Generator) -> np.ndarray:
    """Return assignments `[n]` in which no cluster exceeds its share of `BALANCE / num_clusters`.

    While the largest cluster exceeds its share, randomly drawn assignments move from it to the smallest cluster, as many as
    make the two equally large. A cluster exceeds its share by at most one assignment, which cannot be split.
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
