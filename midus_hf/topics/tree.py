"""A tree of topics: the centroids of its nodes, and the path of an embedding from the root to a leaf."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import torch

from midus_hf.topics.tree_files import (
    RECORD_FILE,
    TreeOrigin,
    altered,
    check_similarity,
    fingerprint_of,
    folder_of_tree,
    read_tree,
    write_tree,
)

# Most elements of centroids that are copied at a time: each embedding that descends gets a copy of its node's children.
_ELEMENTS = 2**23


class ClusterTree:
    """Nested clusters: every node above the last level has `branching` children.

    Level l, counted from 0, has `roots * branching ** l` nodes, numbered from 0 within the level. The children of node i
    are the nodes `branching * i + digit` of the next level. A tree is built with `branching` roots, and gets more when
    it grows: new nodes are numbered behind the old ones, which keep their numbers. All tensors are on the CPU.

    Args:
        branching: Number of children per node, at least 2.
        centroids: One tensor per level, `[roots * branching ** l, c]`, kept as float32. A node whose centroid has a NaN
            has no data, and nothing is ever assigned to it.
        origin: What the tree was built with. Default: unknown.
        sizes: Number of windows per node, one tensor per level, `[roots * branching ** l]`, int64. Default: None; not
            counted.
        min_similarity: Least `similarity` of texts that belong to a topic of the tree, like the texts that the tree was
            built from. Default: None; not measured.
        grown_from: Fingerprints of the trees that the tree came from, by growth or by deletion of nodes, the first one
            first. Default: none.

    Raises:
        ValueError: If shapes do not fit, a value is infinite, `min_similarity` is not a cosine, or no path leads to a
            leaf.
    """

    def __init__(
        self,
        branching: int,
        centroids: list[torch.Tensor],
        origin: TreeOrigin | None = None,
        sizes: list[torch.Tensor] | None = None,
        min_similarity: float | None = None,
        grown_from: Sequence[str] = (),
    ):
        check_similarity(min_similarity)
        self.grown_from, self.min_similarity = tuple(grown_from), min_similarity
        if branching < 2:
            raise ValueError(f"branching is {branching}; expected at least 2 children of a node.")
        if not centroids:
            raise ValueError("centroids is empty; expected one tensor for each level of the tree.")
        width, self.roots = centroids[0].shape[-1], max(branching, len(centroids[0]))
        for level, tensor in enumerate(centroids):
            expected = (self.roots * branching**level, width)
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"centroids of level {level + 1} have the shape {tuple(tensor.shape)}; expected {expected}, a row for each "
                    f"of its nodes with branching {branching}."
                )
            if sizes is not None and (len(sizes) != len(centroids) or tuple(sizes[level].shape) != expected[:1]):
                raise ValueError(
                    "sizes do not fit centroids; expected a number for each node, one tensor for each level."
                )
        self.branching = branching
        self.width = width
        self.origin = TreeOrigin() if origin is None else origin
        self.sizes = None if sizes is None else [level.to("cpu", torch.int64) for level in sizes]
        wide = [tensor.detach().to("cpu", torch.float32) for tensor in centroids]
        # Every empty node gets the same NaN in every element, so that equal trees have equal bytes.
        self.centroids = [torch.where(level.isnan().any(-1, keepdim=True), torch.nan, level) for level in wide]
        if any(level.isinf().any() for level in self.centroids):
            raise ValueError("centroids have infinite values; expected finite ones, or NaN for nodes without data.")
        #: Whether a leaf with data can be reached from each node, `[roots * branching ** l]`, bool, per level.
        self.takeable = _takeable(self.centroids, branching)
        if not self.takeable[0].any():
            raise ValueError("centroids are NaN on every way to a leaf; expected at least one leaf with data.")

    @property
    def levels(self) -> int:
        """Number of levels, p."""
        return len(self.centroids)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of branching and centroids, 64 hexadecimal digits: equal for trees that give equal paths."""
        return fingerprint_of(self.branching, self.centroids)

    def paths(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the path of each embedding by greedy descent: at each level to the child with the nearest centroid (L2).

        Children from which no leaf with data can be reached are left out; the next best sibling is taken. Among children
        that are equally near in float32, the first is taken.

        Args:
            embeddings: Embeddings `[N, c]`, finite, of any float dtype.

        Returns:
            The node at each level, `[N, p]`, int64, on the CPU.

        Raises:
            ValueError: If embeddings are not of the tree's width or not finite.
        """
        if embeddings.dim() != 2 or embeddings.shape[1] != self.width:
            raise ValueError(
                f"embeddings have the shape {tuple(embeddings.shape)}; expected [N, {self.width}], the width of the tree. "
                "Embed texts with the model that the tree was built with."
            )
        if not embeddings.isfinite().all():
            raise ValueError("embeddings have values that are not finite; expected numbers. Embed these texts again.")
        rows = embeddings.detach().cpu().split(max(1, _ELEMENTS // (self.roots * self.width)))
        return torch.cat([self._descend(stretch) for stretch in rows])

    def similarity(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the cosine of each embedding with the nearest topic of the first level, by the topic's centroid.

        Topics of the first level are broad and have many windows. A leaf may have a single window, to which no other
        text is near.

        Args:
            embeddings: Embeddings `[N, c]`, finite, of any float dtype.

        Returns:
            `[N]`, float32, from -1 to 1.
        """
        topics = self.centroids[0][self.takeable[0]]
        rows = torch.nn.functional.normalize(embeddings.detach().cpu().double(), dim=-1)
        return (rows @ torch.nn.functional.normalize(topics.double(), dim=-1).T).max(-1).values.float()

    def without(self, nodes: Iterable[tuple[int, int]]) -> "ClusterTree | None":
        """Return the tree without some nodes and all below: to these no text is assigned. Other nodes keep their numbers.

        Args:
            nodes: Level, counted from 1, and number of each node.

        Returns:
            The tree, grown from this one; None if no leaf is left.
        """
        centroids = [level.clone() for level in self.centroids]
        sizes = None if self.sizes is None else [level.clone() for level in self.sizes]
        for level, node in nodes:
            for deeper in range(level - 1, self.levels):
                count = self.branching ** (deeper - level + 1)
                centroids[deeper][node * count : (node + 1) * count] = torch.nan
                if sizes is not None:
                    sizes[deeper][node * count : (node + 1) * count] = 0
        if not _takeable(centroids, self.branching)[0].any():
            return None
        lineage = [*self.grown_from, self.fingerprint]
        return ClusterTree(self.branching, centroids, self.origin, sizes, self.min_similarity, lineage)

    def save(self, folder: str | Path) -> None:
        """Write `tree.safetensors` and `tree.json`.

        Args:
            folder: Folder of the files, which is created.
        """
        record = {
            "branching": self.branching,
            "levels": self.levels,
            "width": self.width,
            "roots": self.roots,
            "fingerprint": self.fingerprint,
            **dataclasses.asdict(self.origin),
            "grown_from": list(self.grown_from),
            "min_similarity": self.min_similarity,
            "sizes": None if self.sizes is None else [level.tolist() for level in self.sizes],
        }
        write_tree(folder, self.centroids, record)

    @classmethod
    def load(cls, folder: str | Path) -> "ClusterTree":
        """Read a saved tree.

        Args:
            folder: Folder that `save` wrote, or folder of a model whose bank has the tree's files.

        Raises:
            ValueError: If a file is missing, of another version, truncated or altered. The message names the file.
        """
        arguments = read_tree(folder)
        try:
            return cls(**arguments)
        except ValueError as error:  # its centroids have the fingerprint of a tree, so its record does not fit them
            raise altered(folder_of_tree(Path(folder).expanduser()) / RECORD_FILE, str(error)) from error

    def _descend(self, embeddings: torch.Tensor) -> torch.Tensor:
        distances = squared_distances(embeddings, self.centroids[0])
        distances[:, ~self.takeable[0]] = torch.inf
        nodes = distances.argmin(-1)
        path = [nodes]
        for centroids, takeable_of_level in zip(self.centroids[1:], self.takeable[1:], strict=True):
            children = centroids.unflatten(0, (-1, self.branching))[nodes]  # [N, branching, c]
            distances = squared_distances(embeddings, children)
            distances[~takeable_of_level.unflatten(0, (-1, self.branching))[nodes]] = torch.inf
            nodes = self.branching * nodes + distances.argmin(-1)
            path.append(nodes)
        return torch.stack(path, dim=-1)


def _takeable(centroids: Sequence[torch.Tensor], branching: int) -> list[torch.Tensor]:
    """Return whether a leaf with data can be reached from each node, `[roots * branching ** l]`, bool, per level."""
    takeable = [~level[:, 0].isnan() for level in centroids]
    for parents, children in reversed(list(itertools.pairwise(takeable))):
        parents &= children.unflatten(0, (-1, branching)).any(-1)
    return takeable


def squared_distances(embeddings: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Return squared L2 distances `[N, k]`, |x|^2 - 2 <x, m> + |m|^2, float32; NaN where the centroid is NaN.

    The distances are computed in float64 and then rounded, so they do not depend on how many are computed at a time.

    Args:
        embeddings: x, `[N, c]`.
        centroids: m, `[k, c]` for all embeddings, or `[N, k, c]`, with separate centroids for each embedding.
    """
    rows, wide = embeddings.double(), centroids.double()
    products = rows @ wide.T if wide.dim() == 2 else (wide @ rows.unsqueeze(-1)).squeeze(-1)
    lengths = rows.square().sum(-1, keepdim=True)
    return (lengths - 2 * products + wide.square().sum(-1)).float()
