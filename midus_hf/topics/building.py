"""Hierarchical k-means: building a tree level by level, and assigning each row to a leaf."""

import functools
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from midus_hf.config.fetched_blocks import level_file
from midus_hf.files.outputs import whole_file
from midus_hf.topics.tree import ClusterTree, squared_distances
from midus_hf.topics.tree_files import TreeOrigin

# Largest size of a cluster in a step, as a multiple of the mean cluster size.
BALANCE = 1.5

# Function that draws up to a number of rows without replacement and returns `[n, c]`, float32, with rows of length 1.
Sampler = Callable[[int, np.random.Generator], torch.Tensor]

# Number of rows that are read and assigned at a time.
_STRETCH = 8192

# Most leaves that options may ask for.
_MOST_LEAVES = 2**24

# Rows of which one is held out, and most rows that are: of these texts, the least similarity of a topic's texts is measured.
_ROWS_A_HELD_OUT, _MOST_HELD_OUT = 20, 512
# Words of the texts that are measured, and the percentile of their similarity that may be rejected.
_LENGTHS, _REJECTED = (6, 15, 60, 240), 5

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


class LevelFiles:
    """Files of the levels of a tree that is being built, which a later run with the same fingerprint reuses."""

    def __init__(self, folder: Path, fingerprint: str):
        self._folder, self._fingerprint = folder, fingerprint

    def read(self, level: int) -> tuple[torch.Tensor, np.ndarray] | None:
        """Return the centroids of a level, and the node of each row; None if the level is not finished."""
        path = self._folder / level_file(level)
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            if file.metadata() != {"fingerprint": self._fingerprint}:
                return None
            return file.get_tensor("centroids"), file.get_tensor("nodes").numpy()

    def write(self, level: int, centroids: torch.Tensor, nodes: np.ndarray) -> None:
        """Write the centroids of a level, `[branching ** level, c]`, and the node of each row, `[N]`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self._folder / level_file(level)) as partial:
            tensors = {"centroids": centroids, "nodes": torch.from_numpy(nodes)}
            save_file(tensors, partial, metadata={"fingerprint": self._fingerprint})

    def delete(self) -> None:
        """Delete the files and their folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def build_tree(
    embeddings: np.ndarray,
    options: TreeOptions,
    origin: TreeOrigin | None = None,
    progress: Callable[[int], object] | None = None,
    finished: LevelFiles | None = None,
    held_out: np.ndarray | None = None,
) -> BuiltTree:
    """Cluster rows into a tree.

    Each node is clustered by `kmeans`, and then each of its members is assigned to the child with the nearest centroid.
    This assignment is not balanced, so a cluster can be larger than in EM, which balances clusters. A node with fewer than
    `2 * branching` members gets one cluster for every two members, and a node with fewer than 4 gets a single child.
    Children without members have no data, and no path leads to them. Random choices at a node depend only on the seed
    and the node.

    Args:
        embeddings: Rows `[N, c]`, float16 or float32, which may be a memory map. Rows are read in stretches, and divided
            by their lengths as they are read. Beside the rows being read, 34 bytes per row are held in memory.
        origin: Origin to record in the tree. Default: only the seed.
        progress: Called with the number of rows that were just assigned at a level, which sum to N per level. Default:
            None.
        finished: Levels that an interrupted run has finished, which are reused. New levels are added. Default: None.
        held_out: Whether each row is left out of the centroids, `[N]`, bool; it is assigned like the others.
            Default: None; no row is left out.

    Raises:
        ValueError: If there are no rows, or rows of length 0 or with values that are not finite.
    """
    if not len(embeddings):
        raise ValueError("embeddings has no rows; expected at least 1. Add text to the corpus.")
    nodes = np.zeros(len(embeddings), np.int64)
    centroids, sizes = [], []
    for level in range(1, options.levels + 1):
        stored = None if finished is None else finished.read(level)
        if stored is None:
            stored = _split(embeddings, nodes, level, options, held_out, progress)
            if finished is not None:
                finished.write(level, *stored)
        elif progress is not None:
            progress(len(nodes))
        child_centroids, nodes = stored
        counts = torch.from_numpy(np.bincount(nodes, minlength=len(child_centroids)))
        child_centroids[counts == 0] = torch.nan
        centroids.append(child_centroids)
        sizes.append(counts)
    tree = ClusterTree(options.branching, centroids, origin or TreeOrigin(seed=options.seed), sizes)
    tree.min_similarity = _least_similarity(tree, embeddings, options.seed)
    return BuiltTree(tree, nodes)


def topic_tree(
    embeddings: np.ndarray,
    paths: np.ndarray,
    branching: int,
    origin: TreeOrigin,
    held_out: np.ndarray | None = None,
) -> BuiltTree:
    """Return the tree whose nodes are given: a node's centroid is the mean of its rows."""
    centroids, sizes = [], []
    for level, nodes in enumerate(paths.T, start=1):
        means = torch.full((branching**level, embeddings.shape[1]), torch.nan)
        for node, members in _members_of(nodes):
            if held_out is not None and not held_out[members].all():
                members = members[~held_out[members]]
            stretches = np.array_split(members, range(_STRETCH, len(members), _STRETCH))
            sums = [unit_rows(embeddings, rows).double().sum(0) for rows in stretches]
            means[node] = (torch.stack(sums).sum(0) / len(members)).float()
        centroids.append(means)
        sizes.append(torch.from_numpy(np.bincount(nodes, minlength=len(means))))
    tree = ClusterTree(branching, centroids, origin, sizes)
    tree.min_similarity = _least_similarity(tree, embeddings, origin.seed or 0)
    return BuiltTree(tree, paths[:, -1])


def _split(
    embeddings: np.ndarray,
    nodes: np.ndarray,
    level: int,
    options: TreeOptions,
    held_out: np.ndarray | None,
    progress: Callable[[int], object] | None,
) -> tuple[torch.Tensor, np.ndarray]:
    """Cluster the members of each node, and return the children's centroids and the child of each row."""
    child_centroids = torch.full((options.branching**level, embeddings.shape[1]), torch.nan)
    children = np.empty_like(nodes)
    for parent, members in _members_of(nodes):
        chosen = members
        if held_out is not None and not held_out[members].all():
            chosen = members[~held_out[members]]
        centroids = kmeans(
            functools.partial(_drawn_rows, embeddings, chosen),
            max(1, min(options.branching, len(chosen) // 2)),
            options.steps,
            options.samples,
            np.random.default_rng([options.seed, level, parent]),
        )
        first = options.branching * parent
        child_centroids[first : first + len(centroids)] = centroids
        for stretch in np.array_split(members, range(_STRETCH, len(members), _STRETCH)):
            children[stretch] = first + nearest(unit_rows(embeddings, stretch), centroids).numpy()
            if progress is not None:
                progress(len(stretch))
    return child_centroids, children


def kmeans(sample: Sampler, num_clusters: int, steps: int, samples: int, rng: np.random.Generator) -> torch.Tensor:
    """Compute centroids, `[num_clusters, c]`, float32, by expectation maximisation."""
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
    """Return assignments `[n]` in which no cluster exceeds its share of `BALANCE / num_clusters`."""
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


def held_out_rows(count: int, seed: int) -> np.ndarray | None:
    """Draw the rows of `count` that a tree is not built from, `[count]`, bool: one of 20, at most 512; None of fewer than 40."""
    if count < 2 * _ROWS_A_HELD_OUT:
        return None
    drawn = np.random.default_rng([seed, 1]).choice(
        count, min(count // _ROWS_A_HELD_OUT, _MOST_HELD_OUT), replace=False
    )
    held_out = np.zeros(count, bool)
    held_out[drawn] = True
    return held_out


def calibrate(
    tree: ClusterTree,
    texts: Sequence[str],
    embed: Callable[[Sequence[str]], torch.Tensor],
    seed: int,
) -> None:
    """Lower a tree's least similarity so that 95 of 100 texts that the tree was not built from reach it, of every length."""
    cuts = [stretches for length in _LENGTHS if (stretches := _stretches(texts, length, seed))]
    if not cuts:
        return
    similarities = [tree.similarity(embed(stretches)).numpy() for stretches in cuts]
    reached = min(float(np.percentile(each, _REJECTED, method="lower")) for each in similarities)
    reached = math.floor(reached * 10_000) / 10_000  # more than a row's similarity changes in another batch
    tree.min_similarity = max(-1.0, min(reached, 1.0 if tree.min_similarity is None else tree.min_similarity))


def _stretches(texts: Sequence[str], length: int, seed: int) -> list[str]:
    """Return so many consecutive words of each text that has as many."""
    rng = np.random.default_rng([seed, 2, length])
    stretches = []
    for split in map(str.split, texts):
        if len(split) >= length:
            begin = int(rng.integers(len(split) - length + 1))
            stretches.append(" ".join(split[begin : begin + length]))
    return stretches


def grow_tree(
    tree: ClusterTree,
    embeddings: np.ndarray,
    options: TreeOptions,
    progress: Callable[[int], object] | None = None,
    held_out: np.ndarray | None = None,
) -> BuiltTree:
    """Return a tree that has new nodes, beside the old ones, for the rows that are near no topic of a tree."""
    if (options.branching, options.levels) != (tree.branching, tree.levels):
        raise ValueError(
            f"options are of {options.levels} levels of {options.branching}; expected {tree.levels} of {tree.branching}, those of "
            "the tree that grows."
        )
    near = np.concatenate(
        [
            (tree.similarity(unit_rows(embeddings, rows)) >= _least(tree)).numpy()
            for rows in np.array_split(np.arange(len(embeddings)), range(_STRETCH, len(embeddings), _STRETCH))
        ]
    )
    new = np.flatnonzero(~near)
    if not len(new):
        raise ValueError(
            f"all {len(near):,} windows are near a topic of the tree; expected texts of topics that it lacks. Assign them by the "
            "tree as it is."
        )
    part = build_tree(
        unit_rows(embeddings, new).numpy(), options, None, progress, None, None if held_out is None else held_out[new]
    )
    leaves = np.empty(len(near), np.int64)
    leaves[new] = part.leaves + len(tree.centroids[-1])
    old = np.flatnonzero(near)
    for rows in np.array_split(old, range(_STRETCH, len(old), _STRETCH)):
        if len(rows):
            leaves[rows] = tree.paths(unit_rows(embeddings, rows))[:, -1].numpy()
    assert part.tree.sizes is not None
    centroids = [torch.cat(levels) for levels in zip(tree.centroids, part.tree.centroids, strict=True)]
    sizes = None
    if tree.sizes is not None:
        counts = torch.from_numpy(np.bincount(leaves, minlength=len(centroids[-1])))
        sizes = []
        for level, before in enumerate(tree.sizes, 1):
            added = counts.view(len(centroids[level - 1]), -1).sum(-1)
            added[: len(before)] += before
            sizes.append(added)
    grown = ClusterTree(
        *(tree.branching, centroids, tree.origin, sizes),
        min_similarity=min(_least(tree), _least(part.tree)),
        grown_from=[*tree.grown_from, tree.fingerprint],
    )
    return BuiltTree(grown, leaves)


def _least(tree: ClusterTree) -> float:
    return -1.0 if tree.min_similarity is None else tree.min_similarity


def _least_similarity(tree: ClusterTree, embeddings: np.ndarray, seed: int) -> float:
    """Return the similarity that 99 of 100 rows, or of a sample, reach: the first percentile, rounded down to four places."""
    rows = np.arange(len(embeddings))
    if len(rows) > _MOST_MEASURED:
        drawn = np.random.default_rng([seed, 0]).choice(len(rows), _MOST_MEASURED, replace=False, shuffle=False)
        rows = np.sort(drawn)
    stretches = np.array_split(rows, range(_STRETCH, len(rows), _STRETCH))
    similarity = np.concatenate([tree.similarity(unit_rows(embeddings, stretch)).numpy() for stretch in stretches])
    # Rounding down takes away more than a row's similarity changes if the row is embedded in another batch.
    return math.floor(np.percentile(similarity, 1, method="lower") * 10_000) / 10_000


def unit_rows(embeddings: np.ndarray, rows: np.ndarray | slice) -> torch.Tensor:
    """Read some of the rows `[N, c]`, float16 or float32, and divide each by its length: `[n, c]`, float32."""
    read = torch.from_numpy(np.array(embeddings[rows], np.float32))
    lengths = read.norm(dim=-1, keepdim=True)
    if not (lengths.isfinite() & (lengths > 0)).all():
        raise ValueError(
            "embeddings have rows of length 0 or with values that are not finite; expected finite rows. Embed the corpus again."
        )
    return read / lengths


def _drawn_rows(embeddings: np.ndarray, members: np.ndarray, number: int, rng: np.random.Generator) -> torch.Tensor:
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
