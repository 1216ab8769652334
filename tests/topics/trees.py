"""Random trees for tests."""

import torch

from midus_hf.topics.tree import ClusterTree, TreeOrigin


def random_tree(branching: int = 3, levels: int = 3, width: int = 5, seed: int = 0, empty: tuple = (), **arguments):
    """A tree of Gaussian centroids; `empty` are the pairs of level, from 1, and node that have no data."""
    generator = torch.Generator().manual_seed(seed)
    centroids = [torch.randn(branching ** (level + 1), width, generator=generator) for level in range(levels)]
    for level, node in empty:
        centroids[level - 1][node] = torch.nan
    return ClusterTree(branching, centroids, **arguments)


def counted_tree() -> ClusterTree:
    """A tree that knows where it is from and how large its nodes are."""
    leaves = torch.arange(9)
    origin = TreeOrigin("model", "ab12", 256, "tokenizer", 2048, 7)
    return random_tree(3, 2, origin=origin, sizes=[leaves.unflatten(0, (3, 3)).sum(-1), leaves])
