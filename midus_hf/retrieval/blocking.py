"""Paths of texts of which each may not fetch what fits it best (figure 6b)."""

from collections.abc import Sequence

import torch

from midus_hf.retrieval.cluster_tree import ClusterTree


def paths_without_best(
    tree: ClusterTree, embeddings: torch.Tensor, level: int, count: int, blocked: Sequence[tuple[int, int]] = ()
) -> torch.Tensor:
    """Paths where the nodes of one level that each embedding would take first are blocked, for it alone.

    They are found one after the other: the node of its path is blocked, then that of the path it takes instead, and so on.

    Args:
        tree: The tree.
        embeddings: As in `ClusterTree.paths`.
        level: Whose nodes are blocked, from 1.
        count: Of nodes that are blocked for each embedding, 0 or more.
        blocked: As in `ClusterTree.paths`, for all embeddings. Default: none.

    Returns:
        `[N, p]` int64, on the CPU: the node at each level.

    Raises:
        ValueError: As `ClusterTree.paths`, or if the tree has no such level.
    """
    if not 1 <= level <= tree.levels:
        raise ValueError(f"best nodes are to be blocked at level {level}; expected one from 1 to {tree.levels}.")
    paths = tree.paths(embeddings, blocked)
    refused: list[frozenset[tuple[int, int]]] = [frozenset(blocked)] * len(paths)
    for _ in range(count):
        members: dict[frozenset[tuple[int, int]], list[int]] = {}
        for row, node in enumerate(paths[:, level - 1].tolist()):
            refused[row] |= {(level, node)}
            members.setdefault(refused[row], []).append(row)
        for nodes, rows in members.items():
            paths[rows] = tree.paths(embeddings[rows], sorted(nodes))
    return paths
