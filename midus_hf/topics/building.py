"""Hierarchical k-means: building a tree level by level, and assigning each row to a leaf."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from midus_hf.config.errors import RequestError, first_few, print_note
from midus_hf.data.held_out import belongs_to_share
from midus_hf.topics.tree import ClusterTree, TreeOrigin, squared_distances

BALANCE = 1.5  # largest size of a cluster in a step, as a multiple of the mean cluster size
# Function that draws up to a number of rows without replacement and returns `[n, c]`, float32, with rows of length 1.
Sampler = Callable[[int, np.random.Generator], torch.Tensor]

_STRETCH = 8192  # rows that are read and assigned at a time
_MOST_LEAVES = 2**24
# One row in this many is held out, up to a number of rows; the least similarity of a topic's texts is measured on these.
_ROWS_A_HELD_OUT, _MOST_HELD_OUT = 20, 512
# Numbers of words of the measured texts, and the percentile of their similarity that may be rejected.
_LENGTHS = (6, 15, 60, 240)
_REJECTED = 5
# Largest number of rows on which a tree's least similarity is measured: the share below it is exact to 0.04 percentage points.
_MOST_MEASURED = 2**16
# Share of documents that are held out to set the limits of topics, and the fewest of a topic that set one.
_HELD_OUT_SHARE = 0.2
_MIN_HELD_OUT_DOCUMENTS = 20


@dataclass(frozen=True)
class TreeOptions:
    """Options for building a tree.

    Args:
        branching: Number of children per node.
        levels: Number of levels below the root.
        steps: Steps of EM for each node.
        samples: Number of rows drawn for each step.
        seed: Seed of all random choices.
        topic_quantile: Share of a topic's held-out windows that its limit lets in, above 0 and at most 1; texts further from their
            topic have none. `midus_hf.topics.run.build` then leaves one document in five, chosen by its text, out of centroids; a
            topic with fewer than 20 of them gets no limit. Default: no topic has a limit.

    Raises:
        RequestError: If a number is out of range.
    """

    branching: int = 16
    levels: int = 4
    steps: int = 20
    samples: int = 6400
    seed: int = 0
    topic_quantile: float | None = None

    def __post_init__(self) -> None:
        for name, least in {"branching": 2, "levels": 1, "steps": 1, "seed": 0}.items():
            if getattr(self, name) < least:
                raise RequestError(f"{name} is {getattr(self, name)}; expected at least {least}.")
        if self.samples < 2 * self.branching:
            raise RequestError(
                f"samples is {self.samples}; expected at least {2 * self.branching}, two for each of {self.branching} clusters."
            )
        if self.branching**self.levels > _MOST_LEAVES:
            raise RequestError(
                f"branching {self.branching} and levels {self.levels} make {self.branching**self.levels:,} leaves; expected at "
                f"most {_MOST_LEAVES:,}. Lower one of them."
            )
        if self.topic_quantile is not None and not 0 < self.topic_quantile <= 1:
            raise RequestError(
                f"topic_quantile is {self.topic_quantile}; expected a share above 0 and at most 1, such as 0.95. Leave it out for no "
                "limit."
            )


class BuiltTree(NamedTuple):
    """A tree, whose `sizes` count rows, with the leaf of each row, `[N]`, int64."""

    tree: ClusterTree
    leaves: np.ndarray


def build_tree(
    embeddings: np.ndarray,
    options: TreeOptions,
    origin: TreeOrigin | None = None,
    progress: Callable[[int], object] | None = None,
    held_out: np.ndarray | None = None,
) -> BuiltTree:
    """Cluster rows into a tree.

    Each node is clustered by `kmeans`; then its members are assigned to the child with the nearest centroid, which is not balanced as
    EM is. A node with fewer than `2 * branching` members gets one cluster for every two members, and a node with fewer than 4 a
    single child. Children without members have no data, and no path leads to them. Random choices at a node depend only on the seed
    and the node.

    Args:
        embeddings: Rows `[N, c]`, float16 or float32, which may be a memory map: read in pieces, and normalised as they are read. 34
            more bytes per row are kept in memory.
        origin: Origin to record in the tree. Default: only the seed.
        progress: Called with the number of rows that were just assigned at a level, which sum to N per level.
        held_out: Whether each row is left out of the centroids, `[N]`, bool; it is assigned like the others. Default: none is.

    Raises:
        RequestError: If there are no rows, or rows of length 0 or with values that are not finite.
    """
    if not len(embeddings):
        raise RequestError("embeddings has no rows; expected at least 1. Add text to the corpus.")
    nodes = np.zeros(len(embeddings), np.int64)
    centroids, sizes = [], []
    for level in range(1, options.levels + 1):
        of_level, nodes = _split(embeddings, nodes, level, options, held_out, progress)
        counts = torch.from_numpy(np.bincount(nodes, minlength=len(of_level)))
        of_level[counts == 0] = torch.nan
        centroids.append(of_level)
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
    """Return the tree of rows with given `paths` `[N, p]`: a centroid is the mean of its rows."""
    centroids, sizes = [], []
    for level, nodes in enumerate(paths.T, start=1):
        means = torch.full((branching**level, embeddings.shape[1]), torch.nan)
        for node, _, chosen in _members_of(nodes, held_out):
            sums = [unit_rows(embeddings, rows).double().sum(0) for rows in _stretches_of(chosen)]
            means[node] = (torch.stack(sums).sum(0) / len(chosen)).float()
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
    """Cluster each node's members; return the children's centroids (NaN if absent) and rows' children."""
    child_centroids = torch.full((options.branching**level, embeddings.shape[1]), torch.nan)
    children = np.empty_like(nodes)
    for parent, members, chosen in _members_of(nodes, held_out):
        centroids = kmeans(
            functools.partial(_drawn_rows, embeddings, chosen),
            max(1, min(options.branching, len(chosen) // 2)),
            options.steps,
            options.samples,
            np.random.default_rng([options.seed, level, parent]),
        )
        first = options.branching * parent
        child_centroids[first : first + len(centroids)] = centroids
        for stretch in _stretches_of(members):
            children[stretch] = first + nearest(unit_rows(embeddings, stretch), centroids).numpy()
            if progress is not None:
                progress(len(stretch))
    return child_centroids, children


def kmeans(sample: Sampler, num_clusters: int, steps: int, samples: int, rng: np.random.Generator) -> torch.Tensor:
    """Compute centroids, `[num_clusters, c]`, float32, by balanced EM on fresh samples."""
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
    """Return each row's nearest of the centroids `[k, c]`, `[n]`, int64, the first of equal ones."""
    return squared_distances(rows, centroids).argmin(-1)


def balanced(assigned: np.ndarray, num_clusters: int, rng: np.random.Generator) -> np.ndarray:
    """Return assignments `[n]` whose clusters exceed `BALANCE / num_clusters` by at most one."""
    assigned = assigned.copy()
    sizes = np.bincount(assigned, minlength=num_clusters)
    while sizes.max() > BALANCE / num_clusters * len(assigned):
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
    """Draw held-out rows, `[count]`, bool: one in 20, at most 512; None of fewer than 40."""
    if count < 2 * _ROWS_A_HELD_OUT:
        return None
    drawn = np.random.default_rng([seed, 1]).choice(
        count, min(count // _ROWS_A_HELD_OUT, _MOST_HELD_OUT), replace=False
    )
    held_out = np.zeros(count, bool)
    held_out[drawn] = True
    return held_out


def held_out_documents(texts: Iterable[str], documents: np.ndarray, options: TreeOptions) -> np.ndarray:
    """Return which windows of `documents` `[N]` set limits of topics, `[N]`, bool: none without a quantile.

    A document is held out with all its windows, by the digest of its text.
    """
    if options.topic_quantile is None:
        return np.zeros(len(documents), bool)
    is_held_out = np.array([belongs_to_share(text, _HELD_OUT_SHARE) for text in texts], bool)
    return is_held_out[documents]


def set_topic_limits(
    built: BuiltTree,
    embeddings: np.ndarray,
    documents: np.ndarray,
    held_out: np.ndarray,
    options: TreeOptions,
    first: int = 0,
) -> None:
    """Set the limits of a tree's topics, if the options have a quantile, and say which have too few texts.

    Args:
        built: The tree, whose `topic_limits` change, with the leaves of N windows.
        embeddings: The windows' rows, `[N, c]`.
        documents: The windows' documents, `[N]`.
        held_out: Whether `held_out_documents` has each window, `[N]`, bool.
        options: Options of the tree.
        first: First topic that gets a limit; those before keep theirs. Default: 0.
    """
    if options.topic_quantile is None:
        return
    tree = built.tree
    limits = tree.topic_limits or [None] * tree.roots
    too_few = []
    topics = built.leaves // tree.branching ** (tree.levels - 1)
    for topic, members, _ in _members_of(topics):
        if topic < first:
            continue
        measured = members[held_out[members]]
        if len(np.unique(documents[measured])) < _MIN_HELD_OUT_DOCUMENTS:
            too_few.append(str(topic))
            continue
        distances = [-_similarities(tree, embeddings, rows, topic) for rows in _stretches_of(measured)]
        furthest = np.quantile(np.concatenate(distances), options.topic_quantile, method="higher")
        limits[topic] = _rounded_down(-furthest)
    tree.topic_limits = limits
    if too_few:
        print_note(
            f"topics with fewer than {_MIN_HELD_OUT_DOCUMENTS} held-out documents, which get no limit: {first_few(too_few)}"
        )


def _similarities(tree: ClusterTree, embeddings: np.ndarray, rows: np.ndarray, topic: int) -> np.ndarray:
    """Return the cosine of some of the rows `[N, c]` with a topic of the first level: `[n]`."""
    topics = torch.full((len(rows),), topic)
    return tree.topic_similarity(unit_rows(embeddings, rows), topics).numpy()


def calibrate(
    tree: ClusterTree,
    texts: Sequence[str],
    embed: Callable[[Sequence[str]], torch.Tensor],
    seed: int,
) -> None:
    """Lower a tree's least similarity so that 95 of 100 held-out texts of every length reach it."""
    cut = [_stretches(texts, length, seed) for length in _LENGTHS]
    cuts = [stretches for stretches in cut if stretches]
    if not cuts:
        return
    similarities = [tree.similarity(embed(stretches)).numpy() for stretches in cuts]
    reached = _rounded_down(min(float(np.percentile(each, _REJECTED, method="lower")) for each in similarities))
    tree.min_similarity = max(-1.0, min(reached, 1.0 if tree.min_similarity is None else tree.min_similarity))


def _stretches(texts: Sequence[str], length: int, seed: int) -> list[str]:
    """Return a number of consecutive words from each text that has as many."""
    rng = np.random.default_rng([seed, 2, length])
    stretches = []
    for split in map(str.split, texts):
        if len(split) >= length:
            begin = int(rng.integers(len(split) - length + 1))
            stretches.append(" ".join(split[begin : begin + length]))
    return stretches


def grow_tree(
    tree: ClusterTree, embeddings: np.ndarray, options: TreeOptions, held_out: np.ndarray | None = None
) -> BuiltTree:
    """Return a tree with new nodes, after the old ones, for rows that are near no topic."""
    assert (options.branching, options.levels) == (tree.branching, tree.levels)
    everything = np.arange(len(embeddings))
    stretches = (unit_rows(embeddings, rows) for rows in _stretches_of(everything))
    near = np.concatenate([tree.has_topic(rows, tree.paths(rows)).numpy() for rows in stretches])
    old, new = np.flatnonzero(near), np.flatnonzero(~near)
    if not len(new):
        raise RequestError(
            f"all {len(near):,} windows are near a topic of the tree; expected texts of topics that it lacks. Assign them with the "
            "present tree."
        )
    held_out = None if held_out is None else held_out[new]
    part = build_tree(unit_rows(embeddings, new).numpy(), options, held_out=held_out)
    leaves = np.empty(len(near), np.int64)
    leaves[new] = part.leaves + len(tree.centroids[-1])
    if len(old):
        for rows in _stretches_of(old):
            leaves[rows] = tree.paths(unit_rows(embeddings, rows))[:, -1].numpy()
    centroids = [torch.cat(levels) for levels in zip(tree.centroids, part.tree.centroids, strict=True)]
    sizes = None
    if tree.sizes is not None:
        counts = torch.from_numpy(np.bincount(leaves, minlength=len(centroids[-1])))
        sizes = [counts.view(len(level), -1).sum(-1) for level in centroids]
        for added, before in zip(sizes, tree.sizes, strict=True):
            added[: len(before)] += before
    least = min(_least(tree), _least(part.tree))
    lineage = [*tree.grown_from, tree.fingerprint]
    limits = None if tree.topic_limits is None else [*tree.topic_limits, *[None] * part.tree.roots]
    return BuiltTree(ClusterTree(tree.branching, centroids, tree.origin, sizes, least, lineage, limits), leaves)


def _least(tree: ClusterTree) -> float:
    return -1.0 if tree.min_similarity is None else tree.min_similarity


def _least_similarity(tree: ClusterTree, embeddings: np.ndarray, seed: int) -> float:
    """Return the similarity that 99 of 100 (sampled) rows reach, rounded down to four places."""
    rows = np.arange(len(embeddings))
    if len(rows) > _MOST_MEASURED:
        drawn = np.random.default_rng([seed, 0]).choice(len(rows), _MOST_MEASURED, replace=False, shuffle=False)
        rows = np.sort(drawn)
    similarities = [tree.similarity(unit_rows(embeddings, stretch)).numpy() for stretch in _stretches_of(rows)]
    return _rounded_down(np.percentile(np.concatenate(similarities), 1, method="lower"))


def _rounded_down(similarity: float) -> float:
    return math.floor(similarity * 10_000) / 10_000  # by more than a row's similarity changes in another batch


def unit_rows(embeddings: np.ndarray, rows: np.ndarray | slice) -> torch.Tensor:
    """Read some of the rows `[N, c]`, float16 or float32, at length 1: `[n, c]`, float32."""
    read = torch.from_numpy(np.array(embeddings[rows], np.float32))
    lengths = read.norm(dim=-1, keepdim=True)
    if not (lengths.isfinite() & (lengths > 0)).all():
        raise RequestError(
            "embeddings have rows of length 0 or with values that are not finite; expected finite rows. Embed the corpus again."
        )
    return read / lengths


def _drawn_rows(embeddings: np.ndarray, members: np.ndarray, number: int, rng: np.random.Generator) -> torch.Tensor:
    if len(members) > number:
        members = np.sort(rng.choice(members, number, replace=False, shuffle=False))
    return unit_rows(embeddings, members)


def _members_of(nodes: np.ndarray, held_out: np.ndarray | None = None) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield each node with its members, and those not held out (all, if all are held out)."""
    order = np.argsort(nodes, kind="stable")
    in_order = nodes[order]
    begins = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]]))
    for node, members in zip(in_order[begins].tolist(), np.split(order, begins[1:]), strict=True):
        chosen = members if held_out is None else members[~held_out[members]]
        yield node, members, chosen if len(chosen) else members


def _stretches_of(rows: np.ndarray) -> list[np.ndarray]:
    return np.array_split(rows, range(_STRETCH, len(rows), _STRETCH))
