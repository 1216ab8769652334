"""The retriever: from texts to paths, by an embedding and a tree of it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from midus_hf.retrieval.cluster_tree import ClusterTree
from midus_hf.retrieval.embedding import TextEmbedder
from midus_hf.retrieval.tree_files import check_similarity, lasting_name

_GENERIC = -1
"""At each level of a path: the generic memory."""


class MemoryRetriever:
    """Finds the path of a text in a tree of topics.

    A text that is near no topic has the path of the generic memory, which is -1 at each level: its blocks were trained by texts of
    all topics.

    Args:
        tree: The tree.
        embedder: The model whose embeddings it was built from.
        min_similarity: The least `ClusterTree.similarity` of a text that has a path of its own; -1 for every text. Default: that of
            the tree, and without one -1.

    Raises:
        ValueError: If the embedder has another width than the tree, or is not the model that the tree was built with, or
            `min_similarity` is no cosine.
    """

    def __init__(self, tree: ClusterTree, embedder: TextEmbedder, min_similarity: float | None = None):
        self.min_similarity = tree.min_similarity if min_similarity is None else check_similarity(min_similarity)
        if embedder.width != tree.width:
            raise ValueError(
                f"embedding model {embedder.name!r} has the width {embedder.width}; expected {tree.width}, that of the tree. "
                "Use the model that the tree was built with."
            )
        expected = tree.origin.embedding_fingerprint
        if expected is not None and embedder.fingerprint != expected:
            raise ValueError(
                f"embedding model {embedder.name!r} has the fingerprint {embedder.fingerprint[:16]}...; expected "
                f"{expected[:16]}..., that of {tree.origin.embedding_model!r}, with which the tree was built. Use that model, or "
                "build the tree again."
            )
        self.tree, self.embedder = tree, embedder

    def paths(
        self,
        texts: Sequence[str],
        blocked: Sequence[tuple[int, int]] = (),
        block_best: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """The path of each text.

        Args:
            texts: N of them; of each the first `embedder.max_tokens` tokens are read.
            blocked: As in `ClusterTree.paths`. Default: none.
            block_best: A level, and how many of its nodes, those that a text would take first, are blocked for that text.
                Default: none.

        Returns:
            `[N, p]` int64: the node at each level, or -1 at each where the text is blank or near no topic.

        Raises:
            ValueError: As `paths_without_best`.
        """
        paths = self.paths_of(self.embedder.embed(texts), blocked, block_best)
        is_blank = torch.tensor([not text.strip() for text in texts], dtype=torch.bool)
        return paths.masked_fill(is_blank[:, None], _GENERIC)

    def paths_of(
        self,
        embeddings: torch.Tensor,
        blocked: Sequence[tuple[int, int]] = (),
        block_best: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """As `paths`, of texts that are embedded already, `[N, c]`."""
        if block_best is None:
            paths = self.tree.paths(embeddings, blocked)
        else:
            paths = paths_without_best(self.tree, embeddings, *block_best, blocked)
        return paths_near_topics(self.tree, embeddings, paths, self.min_similarity)

    def save(self, folder: str | Path) -> None:
        """Write the tree, and where its embedding model lies; the model itself is not copied.

        Args:
            folder: Where to; it is made.
        """
        origin = dataclasses.replace(
            self.tree.origin,
            embedding_model=lasting_name(self.embedder.name),
            embedding_fingerprint=self.embedder.fingerprint,
            embedding_max_tokens=self.embedder.max_tokens,
        )
        tree = self.tree
        ClusterTree(tree.branching, tree.centroids, origin, tree.sizes, self.min_similarity).save(folder)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        embedding_model: str | None = None,
        device: str = "cpu",
        batch_size: int = 64,
        min_similarity: float | None = None,
    ) -> "MemoryRetriever":
        """Read a tree and load its embedding model.

        Args:
            folder: What `save`, or `midus cluster build`, wrote; or a model that was trained with a tree, beside which the tree lies.
            embedding_model: Where the model lies now. Default: where it lay when the tree was saved.
            device: As in `TextEmbedder`. Default: `"cpu"`.
            batch_size: As in `TextEmbedder`. Default: 64.
            min_similarity: As in the class. Default: that of the tree.

        Raises:
            ValueError: As `ClusterTree.load`, `TextEmbedder` and `MemoryRetriever`, or if nobody says which model it is.
        """
        tree = ClusterTree.load(folder)
        name = embedding_model or tree.origin.embedding_model
        if name is None:
            raise ValueError(
                f"tree {str(folder)!r} does not say which model embeds its texts; expected a name. Set embedding_model."
            )
        return cls(tree, TextEmbedder(name, device, batch_size, tree.origin.embedding_max_tokens), min_similarity)


def paths_near_topics(
    tree: ClusterTree, embeddings: torch.Tensor, paths: torch.Tensor, min_similarity: float | None
) -> torch.Tensor:
    """Return paths `[N, p]`, -1 at each level in place of those of embeddings `[N, c]` that are near no topic.

    Args:
        tree: Whose paths they are.
        embeddings: Whose paths they are.
        paths: As `ClusterTree.paths` found them.
        min_similarity: As in `MemoryRetriever`; None for no limit.
    """
    if min_similarity is None or min_similarity == -1:
        return paths
    return paths.masked_fill((tree.similarity(embeddings) < min_similarity)[:, None], _GENERIC)


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
