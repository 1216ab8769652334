"""The retriever: finds the paths of texts by their embeddings in a tree of topics."""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.tree import ClusterTree
from midus_hf.topics.tree_files import check_similarity, lasting_name

# Number that stands for the generic memory at every level of a path.
_GENERIC = -1


class MemoryRetriever:
    """Retriever that finds the path of a text in a tree of topics.

    A text that is near no topic gets the path of the generic memory, -1 at each level, whose blocks were trained by
    texts of all topics.

    Args:
        embedder: Embedder with the model that the tree was built with.
        min_similarity: Least `ClusterTree.similarity` of texts that get a path in the tree; -1 gives every text a path.
            Default: the tree's own, and -1 if the tree has none.

    Raises:
        ValueError: If the embedder has another width than the tree, or is not the model that the tree was built with,
            or `min_similarity` is not a cosine.
    """

    def __init__(self, tree: ClusterTree, embedder: TextEmbedder, min_similarity: float | None = None):
        self.min_similarity = tree.min_similarity if min_similarity is None else check_similarity(min_similarity)
        if embedder.width != tree.width:
            raise ValueError(
                f"embedding model {embedder.name!r} has the width {embedder.width}; expected {tree.width}, the width of the tree. "
                "Use the model that the tree was built with."
            )
        expected = tree.origin.embedding_fingerprint
        if expected is not None and embedder.fingerprint != expected:
            raise ValueError(
                f"embedding model {embedder.name!r} has the fingerprint {embedder.fingerprint[:16]}...; expected "
                f"{expected[:16]}..., the fingerprint of {tree.origin.embedding_model!r}, with which the tree was built. Use that "
                "model, or build the tree again."
            )
        self.tree, self.embedder = tree, embedder

    def paths(
        self,
        texts: Sequence[str],
        blocked: Sequence[tuple[int, int]] = (),
        block_best: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Return the path of each text.

        Args:
            texts: N texts, of which the first `embedder.max_tokens` tokens are read.
            blocked: Pairs of level and node that no path may take, as in `ClusterTree.paths`. Default: none.
            block_best: Pair of a level and a count. For each text, the `count` nodes of the level that the text would
                take first are blocked. Default: None; no nodes are blocked.

        Returns:
            The node at each level, `[N, p]`, int64; -1 at every level if the text is blank or near no topic.

        Raises:
            ValueError: If `paths_without_best` refuses `blocked` or `block_best`.
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
        """Return the paths of embeddings `[N, c]`; `blocked` and `block_best` mean the same as in `paths`."""
        if block_best is None:
            paths = self.tree.paths(embeddings, blocked)
        else:
            paths = paths_without_best(self.tree, embeddings, *block_best, blocked)
        return paths_near_topics(self.tree, embeddings, paths, self.min_similarity)

    def save(self, folder: str | Path) -> None:
        """Write the tree with the name and fingerprint of its embedding model. The model itself is not copied.

        Args:
            folder: Folder of the files, which is created.
        """
        origin = dataclasses.replace(
            self.tree.origin,
            embedding_model=lasting_name(self.embedder.name),
            embedding_fingerprint=self.embedder.fingerprint,
            embedding_max_tokens=self.embedder.max_tokens,
        )
        tree = copy.copy(self.tree)
        tree.origin, tree.min_similarity = origin, self.min_similarity
        tree.save(folder)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        embedding_model: str | None = None,
        device: str = "cpu",
        batch_size: int = 64,
        min_similarity: float | None = None,
    ) -> "MemoryRetriever":
        """Load a tree and its embedding model.

        Args:
            folder: Folder that `save` or `midus cluster build` wrote, or a model's folder with the tree that its bank
                was trained with.
            embedding_model: Folder or hub id of the embedding model. Default: the model recorded in the tree.
            device: Device of the embedding model. Default: `"cpu"`.
            batch_size: Texts per forward pass. Default: 64.
            min_similarity: Least similarity of texts that get a path, as in the class. Default: the tree's own.

        Raises:
            ValueError: If the tree or the model cannot be loaded, they do not fit each other, or neither the tree nor
                `embedding_model` names a model.
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
    """Return paths `[N, p]`, with -1 at each level for embeddings whose similarity is below `min_similarity`, if not None."""
    if min_similarity is None or min_similarity == -1:
        return paths
    return paths.masked_fill((tree.similarity(embeddings) < min_similarity)[:, None], _GENERIC)


def paths_without_best(
    tree: ClusterTree, embeddings: torch.Tensor, level: int, count: int, blocked: Sequence[tuple[int, int]] = ()
) -> torch.Tensor:
    """Return a path per embedding, without the `count` nodes of one level, from 1, that the embedding would take first.

    The nodes to leave out are determined one after the other: the node on the path, then the node on the path that is taken
    instead, and so on. The nodes of `blocked`, pairs of level and node, are left out for all embeddings.

    Raises:
        ValueError: If the tree lacks the level, or `ClusterTree.paths` refuses the embeddings or the blocked nodes.
    """
    if not 1 <= level <= tree.levels:
        raise ValueError(f"best nodes are to be blocked at level {level}; expected a level from 1 to {tree.levels}.")
    paths = tree.paths(embeddings, blocked)
    blocked_of_row: list[frozenset[tuple[int, int]]] = [frozenset(blocked)] * len(paths)
    for _ in range(count):
        members: dict[frozenset[tuple[int, int]], list[int]] = {}
        for row, node in enumerate(paths[:, level - 1].tolist()):
            blocked_of_row[row] |= {(level, node)}
            members.setdefault(blocked_of_row[row], []).append(row)
        for nodes, rows in members.items():
            paths[rows] = tree.paths(embeddings[rows], sorted(nodes))
    return paths
