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

    def paths(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the path of each text.

        Args:
            texts: N texts, of which the first `embedder.max_tokens` tokens are read.

        Returns:
            The node at each level, `[N, p]`, int64; -1 at every level if the text is blank or near no topic.
        """
        paths = paths_near_topics(self.tree, self.embedder.embed(texts), self.min_similarity)
        is_blank = torch.tensor([not text.strip() for text in texts], dtype=torch.bool)
        return paths.masked_fill(is_blank[:, None], _GENERIC)

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


def paths_near_topics(tree: ClusterTree, embeddings: torch.Tensor, min_similarity: float | None) -> torch.Tensor:
    """Return the paths of embeddings, `[N, p]`, with -1 at each level where similarity is below `min_similarity`, if not None."""
    paths = tree.paths(embeddings)
    if min_similarity is None or min_similarity == -1:
        return paths
    return paths.masked_fill((tree.similarity(embeddings) < min_similarity)[:, None], _GENERIC)
