"""The retriever: finds the paths of texts by their embeddings in a tree of topics."""

from collections.abc import Sequence
from pathlib import Path

import torch

from midus_hf.config.errors import RequestError
from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.tree import RECORD_FILE, ClusterTree, folder_of_tree

# Number of the generic memory at every level of a path.
_GENERIC = -1


class MemoryRetriever:
    """Retriever that finds the path of a text in a tree of topics.

    A text whose `ClusterTree.similarity` is below the tree's `min_similarity` gets the path of the generic memory, -1 at each
    level, whose blocks were trained by texts of all topics.

    Args:
        embedder: Embedder with the model that the tree was built with.

    Raises:
        RequestError: If the embedder is not the model that the tree was built with.
    """

    def __init__(self, tree: ClusterTree, embedder: TextEmbedder):
        expected = tree.origin.embedding_fingerprint
        if expected is not None and embedder.fingerprint != expected:
            raise RequestError(
                f"embedding model {embedder.name!r} has the fingerprint {embedder.fingerprint[:16]}...; expected "
                f"{expected[:16]}..., the fingerprint of {tree.origin.embedding_model!r}, with which the tree was built. Use that "
                "model, or build the tree again."
            )
        self.tree, self.embedder = tree, embedder

    def paths(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the node of each of N texts at each level, `[N, p]`, int64; -1 if the text is blank or not close to any topic.

        The first `embedder.max_tokens` tokens of a text are read.
        """
        paths = paths_near_topics(self.tree, self.embedder.embed(texts))
        is_blank = torch.tensor([not text.strip() for text in texts], dtype=torch.bool)
        return paths.masked_fill(is_blank[:, None], _GENERIC)

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu", batch_size: int = 64) -> "MemoryRetriever":
        """Load a tree and its embedding model.

        Args:
            folder: Folder that `midus cluster build` wrote, or a model's folder with the tree that its bank was trained with.
            device: Device of the embedding model.
            batch_size: Texts per forward pass.

        Raises:
            RequestError: If the tree or the model cannot be loaded, they do not fit each other, or the tree names no model.
        """
        tree = ClusterTree.load(folder)
        name, record = tree.origin.embedding_model, folder_of_tree(Path(folder).expanduser()) / RECORD_FILE
        if name is None:
            raise RequestError(
                f"tree {str(folder)!r} does not say which model embeds its texts; expected a name. Write the model's folder or hub "
                f"id as embedding_model in {record}."
            )
        if Path(name).is_absolute() and not Path(name).exists():
            raise RequestError(
                f"tree {str(folder)!r} was built with the embedding model {name!r}, which is not there; expected its folder. If it "
                f"has moved, write its new path as embedding_model in {record}."
            )
        return cls(tree, TextEmbedder(name, device, batch_size, tree.origin.embedding_max_tokens))


def paths_near_topics(tree: ClusterTree, embeddings: torch.Tensor) -> torch.Tensor:
    """Return the paths of embeddings, `[N, p]`, with -1 at each level where similarity is below the tree's least one."""
    paths = tree.paths(embeddings)
    if tree.min_similarity is None or tree.min_similarity == -1:
        return paths
    return paths.masked_fill((tree.similarity(embeddings) < tree.min_similarity)[:, None], _GENERIC)
