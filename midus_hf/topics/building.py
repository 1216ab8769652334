"""Hierarchical k-means: building a tree level by level, and assigning each row to a leaf."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from midus_hf.topics.finished_nodes import FinishedNodes
from midus_hf.topics.tree import ClusterTree, squared_distances
from midus_hf.topics.tree_files import TreeOrigin
from midus_hf.topics.window_store import Embeddings

# Largest size of a cluster in a step, as a multiple of the mean cluster size.
BALANCE = 1.5

# Function that draws up to a number of rows without replacement and returns `[n, c]`, float32, with rows of length 1.
Sampler = Callable[[int, np.random.Generator], torch.Tensor]

# Number of rows that are read and assigned at a time.
_STRETCH = 8192

# Most leaves that options may ask for.
_MOST_LEAVES = 2**24

# Mean number of windows per leaf in the tree that `TreeOptions.hint` proposes for a small corpus.
_FILLED = 8

# Most rows on which a tree's least similarity is measured. With so many rows, the share of rows below the measured first
# percentile has a standard error of 0.04 percentage points.
_MOST_MEASURED = 2**16


@dataclass(frozen=True)
class TreeOptions:
    """Options for building a tree.

    Args:
        branching: Number of children per node. Default: 16.
        levels: Number of levels below the root. Default: 4.
        steps: Steps of EM for each node. Default: 20.
        samples: Number of rows drawn for each step. Default: 6400.
        seed: Seed of all random choices. Default: 0.

    Raises:
        ValueError: If a number is out of range.
    """

    branching: int = 16
    levels: int = 4
    steps: int = 20
    samples: int = 6400
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"branching": 2, "levels": 1, "steps": 1, "seed": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least}.")
        if self.samples < 2 * self.branching:
            raise ValueError(
                f"samples is {self.samples}; expected at least {2 * self.branching}, two for each of {self.branching} clusters."
            )
        if self.branching**self.levels > _MOST_LEAVES:
            raise ValueError(
                f"branching {self.branching} and levels {self.levels} make {self.branching**self.levels:,} leaves; expected at "
                f"most {_MOST_LEAVES:,}. Lower one of them."
            )

    def hint(self, windows: int) -> str | None:
        """Return a warning if a corpus cannot fill the tree's leaves, with a proposal of a smaller tree; else None.

        A node is split into at most one cluster for every two windows, so a leaf needs at least two windows.

        Args:
            windows: Number of windows of the corpus.
        """
        leaves = self.branching**self.levels
        if windows >= 2 * leaves:
            return None
        branching, levels = self.branching, self.levels
        while levels > 1 and _FILLED * branching**levels > windows:
            levels -= 1
        if _FILLED * branching**levels > windows:
            branching = max(2, windows // _FILLED)
        return (
            f"{windows:,} windows cannot fill {leaves:,} leaves, so that some stay without text; expected two windows per leaf "
            f"or more. Add text, or build the tree with --branching {branching} --levels {levels}."
        )


@dataclass(frozen=True)
class BuiltTree:
    """A tree with the leaf of each row that it was built from.

    Args:
        tree: The tree. Its `sizes` count rows.
        leaves: The leaf of each row, `[N]`, int64: the last node that `tree.paths` returns for the row.
    """

    tree: ClusterTree
    leaves: np.ndarray


def build_tree(
    embeddings: Embeddings,
    options: TreeOptions,
    origin: TreeOrigin | None = None,
    progress: Callable[[int], None] | None = None,
    finished: FinishedNodes | None = None,
) -> BuiltTree:
    """Cluster rows into a tree.

    Each node is clustered by `kmeans`, and then each of its members is assigned to the child with the nearest centroid.
    This assignment is not balanced, so a cluster can be larger than in EM, which balances clusters. A node with fewer than
    `2 * branching` members gets one cluster for every two members, and a node with fewer than 4 gets a single child.
    Children without members have no data, and no path leads to them. Random choices at a node depend only on the seed
    and the node.

    Args:
        embeddings: Rows `[N, c]`, float16 or float32: an array, a memory map, or `JoinedRows`. Rows are read in
            stretches, and divided by their lengths as they are read. Beside the rows being read, 34 bytes per row are
            held in memory.
        origin: Origin to record in the tree. Default: only the seed.
        progress: Called with the number of rows that were just assigned at a level, which sum to N per level. Default:
            None.
        finished: Results of an interrupted run with the same embeddings and options, which are reused. New results are
            added. Default: None.

    Raises:
        ValueError: If there are no rows, or rows of length 0 or with values that are not finite.
    """
    if not len(embeddings):
        raise ValueError("embeddings has no rows; expected at least 1. Add text to the corpus.")
    branching = options.branching
    nodes = np.zeros(len(embeddings), np.int64)
    centroids, sizes = [], []
    for level in range(1, options.levels + 1):
        child_centroids = cluster_level(embeddings, options, level, nodes, finished)
        assigned = None if finished is None else finished.nodes(level)
        if assigned is not None:
            nodes = assigned
            if progress is not None:
                progress(len(nodes))
        else:
            nodes = assign_rows(embeddings, 0, nodes, child_centroids, branching, progress)
            if finished is not None:
                finished.finish_level(level, nodes)
        counts = torch.from_numpy(np.bincount(nodes, minlength=branching**level))
        child_centroids[counts == 0] = torch.nan
        centroids.append(child_centroids)
        sizes.append(counts)
    tree = ClusterTree(branching, centroids, origin or TreeOrigin(seed=options.seed), sizes)
    tree.min_similarity = _least_similarity(tree, embeddings, options.seed)
    return BuiltTree(tree, nodes)


def cluster_level(
    embeddings: Embeddings,
    options: TreeOptions,
    level: int,
    nodes: np.ndarray,
    finished: FinishedNodes | None = None,
) -> torch.Tensor:
    """Return the centroids of the children of all nodes of a level, `[branching ** level, c]`, float32; NaN for absent children.

    Args:
        level: Level of the children, from 1.
        nodes: The node of each row in the level above, `[N]`, int64.
        finished: Results of an interrupted run, as in `build_tree`. Default: None.
    """
    branching = options.branching
    child_centroids = torch.full((branching**level, embeddings.shape[1]), torch.nan)
    for parent, members in _members_of(nodes):
        centroids = None if finished is None else finished.centroids(level, parent)
        if centroids is None:
            centroids = kmeans(
                functools.partial(_drawn_rows, embeddings, members),
                max(1, min(branching, len(members) // 2)),
                options.steps,
                options.samples,
                np.random.default_rng([options.seed, level, parent]),
            )
            if finished is not None:
                finished.add(level, parent, centroids)
        child_centroids[branching * parent : branching * parent + len(centroids)] = centroids
    return child_centroids


def assign_rows(
    embeddings: Embeddings,
    first: int,
    nodes: np.ndarray,
    of_level: torch.Tensor,
    branching: int,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Return, for n consecutive rows, the child of each row's node that is nearest to the row, `[n]`, int64.

    Args:
        first: Index of the first of the consecutive rows.
        nodes: The node of each of these rows in the level above, `[n]`, int64.
        of_level: Centroids of the children, from `cluster_level`.
        progress: Called with the number of rows that were just assigned. Default: None.
    """
    children = np.empty_like(nodes)
    for parent, members in _members_of(nodes):
        centroids = of_level[branching * parent : branching * (parent + 1)]
        centroids = centroids[~centroids[:, 0].isnan()]
        for stretch in np.array_split(members, range(_STRETCH, len(members), _STRETCH)):
            children[stretch] = branching * parent + nearest(unit_rows(embeddings, first + stretch), centroids).numpy()
            if progress is not None:
                progress(len(stretch))
    return children


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


def _least_similarity(tree: ClusterTree, embeddings: Embeddings, seed: int) -> float:
    """Return the similarity that 99 of 100 rows, or of a sample, reach: the first percentile, rounded down to four places."""
    rows = np.arange(len(embeddings))
    if len(rows) > _MOST_MEASURED:
        drawn = np.random.default_rng([seed, 0]).choice(len(rows), _MOST_MEASURED, replace=False, shuffle=False)
        rows = np.sort(drawn)
    stretches = np.array_split(rows, range(_STRETCH, len(rows), _STRETCH))
    similarity = np.concatenate([tree.similarity(unit_rows(embeddings, stretch)).numpy() for stretch in stretches])
    # Rounding down takes away more than a row's similarity changes if the row is embedded in another batch.
    return math.floor(np.percentile(similarity, 1, method="lower") * 10_000) / 10_000


def unit_rows(embeddings: Embeddings, rows: np.ndarray | slice) -> torch.Tensor:
    """Read some of the rows `[N, c]`, float16 or float32, and divide each by its length: `[n, c]`, float32.

    Raises:
        ValueError: If a row has length 0 or is not finite.
    """
    read = torch.from_numpy(np.array(embeddings[rows], np.float32))
    lengths = read.norm(dim=-1, keepdim=True)
    if not (lengths.isfinite() & (lengths > 0)).all():
        raise ValueError(
            "embeddings have rows of length 0 or with values that are not finite; expected finite rows. Embed the corpus again."
        )
    return read / lengths


def _drawn_rows(embeddings: Embeddings, members: np.ndarray, number: int, rng: np.random.Generator) -> torch.Tensor:
    """Return a sample of the rows of a node's members, as `kmeans` draws them."""
    if len(members) > number:
        members = np.sort(rng.choice(members, number, replace=False, shuffle=False))
    return unit_rows(embeddings, members)


def _members_of(nodes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Return the nodes that have members, ascending, each with its members' row indices, ascending."""
    order = np.argsort(nodes, kind="stable")
    in_order = nodes[order]
    begins = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]]))
    return zip(in_order[begins].tolist(), np.split(order, begins[1:]), strict=True)
