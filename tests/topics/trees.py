"""Random trees for tests."""

import torch

from midus_hf.topics.tree import ClusterTree


def random_tree(branching: int = 3, levels: int = 3, width: int = 5, seed: int = 0, empty: tuple = (), **arguments):
    """A tree of Gaussian centroids; `empty` are the pairs of level, from 1, and node that have no data."""
    generator = torch.Generator().manual_seed(seed)
    centroids = [torch.randn(branching ** (level + 1), width, generator=generator) for level in range(levels)]
    for level, node in empty:
        centroids[level - 1][node] = torch.nan
    return ClusterTree(branching, centroids, **arguments)
