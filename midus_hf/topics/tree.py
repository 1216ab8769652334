"""A tree of topics: centroids, paths of embeddings from the root to a leaf, and its two files."""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from midus_hf.config.errors import RequestError, first_line
from midus_hf.files.checkpoint_files import BANKS_FOLDER, TREE_FILES, parse_json
from midus_hf.files.outputs import atomic_write
from midus_hf.files.secrets import for_record

FORMAT_VERSION = 2
CENTROIDS_FILE, RECORD_FILE = TREE_FILES
# Largest number of elements of centroids that are copied at once: each embedding gets a copy of its node's children.
_ELEMENTS = 2**23


@dataclasses.dataclass(frozen=True)
class TreeOrigin:
    """Models, settings and seed that a tree was built with; None if unknown.

    Args:
        embedding_model: Folder or hub id of the model that embeds texts.
        embedding_fingerprint: The model's `TextEmbedder.fingerprint`.
        embedding_max_tokens: Most tokens of a text that the model reads.
        tokenizer: Folder or hub id of the tokenizer that cut windows.
        window_tokens: Tokens per window, counted by that tokenizer.
        seed: Seed of all random choices.
        topic_quantile: Share of a topic's held-out windows that its limit lets in.
    """

    embedding_model: str | None = None
    embedding_fingerprint: str | None = None
    embedding_max_tokens: int | None = None
    tokenizer: str | None = None
    window_tokens: int | None = None
    seed: int | None = None
    topic_quantile: float | None = None


class ClusterTree:
    """Nested clusters: every node above the last level has `branching` children.

    Level l, counted from 0, has `roots * branching ** l` nodes, numbered from 0 within the level. The children of node i are the
    nodes `branching * i + digit` of the next level. A tree is built with `branching` roots, and gets more when it grows: new nodes
    are numbered after the old ones, which keep their numbers. All tensors are on the CPU.

    Args:
        branching: Number of children per node, at least 2.
        centroids: One tensor per level, `[roots * branching ** l, c]`, kept as float32; a NaN marks a node without data, which
            nothing is assigned to.
        origin: Models, settings and seed of the tree.
        sizes: Number of windows per node, one tensor per level, `[roots * branching ** l]`, int64, if they were counted.
        min_similarity: Least `similarity` of texts that belong to a topic of the tree, if it was measured.
        grown_from: Fingerprints of the trees that it came from, by growth or by deletion of nodes, the first one first.
        topic_limits: Least cosine of each first-level topic's texts with its centroid, `[roots]`, None for a topic without a limit.
            Default: no topic has one.

    Raises:
        RequestError: If shapes do not fit, a value is infinite, `min_similarity` or a limit is not a cosine, or no path leads to a
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
        topic_limits: Sequence[float | None] | None = None,
    ):
        if not _is_limit(min_similarity):
            raise RequestError(
                f"min_similarity is {min_similarity!r}; expected a cosine from -1, which every text reaches, to 1, or null for no "
                "limit."
            )
        self.grown_from = tuple(grown_from)
        self.min_similarity = None if min_similarity is None else float(min_similarity)
        self.branching = branching
        self.origin = origin or TreeOrigin()
        self.width = centroids[0].shape[-1]
        self.roots = max(branching, len(centroids[0]))
        self.topic_limits = None if topic_limits is None else _check_limits(topic_limits, self.roots)
        for level, tensor in enumerate(centroids):
            expected = (self.roots * branching**level, self.width)
            if tuple(tensor.shape) != expected:
                raise RequestError(
                    f"centroids of level {level + 1} have the shape {tuple(tensor.shape)}; expected {expected}, a row for each "
                    f"of its nodes with branching {branching}."
                )
            if sizes is not None and (len(sizes) != len(centroids) or tuple(sizes[level].shape) != expected[:1]):
                raise RequestError(
                    "sizes do not fit centroids; expected a number for each node, one tensor for each level."
                )
        self.sizes = None if sizes is None else [level.to("cpu", torch.int64) for level in sizes]
        wide = [tensor.detach().to("cpu", torch.float32) for tensor in centroids]
        # Every empty node gets the same NaN in every element, so that equal trees have equal bytes.
        self.centroids = [torch.where(level.isnan().any(-1, keepdim=True), torch.nan, level) for level in wide]
        if any(level.isinf().any() for level in self.centroids):
            raise RequestError("centroids have infinite values; expected finite ones, or NaN for nodes without data.")
        #: Whether a leaf with data can be reached from each node, `[roots * branching ** l]`, bool, per level.
        self.takeable = _takeable(self.centroids, branching)
        if not self.takeable[0].any():
            raise RequestError("centroids are NaN on every path to a leaf; expected at least one leaf with data.")

    @property
    def levels(self) -> int:
        """Number of levels, p."""
        return len(self.centroids)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of branching and centroids, 64 hexadecimal digits: equal for trees that give equal paths."""
        # All numbers are little-endian.
        digest = hashlib.sha256(self.branching.to_bytes(8, "little"))
        for level in self.centroids:
            digest.update(level.contiguous().numpy().astype("<f4", copy=False).tobytes())
        return digest.hexdigest()

    def paths(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return paths by greedy descent to the nearest centroid (L2), `[N, p]`, int64, on the CPU.

        Children without a reachable leaf with data are passed over for the next best sibling. Among equals in float32, the first is
        taken.

        Args:
            embeddings: `[N, c]`, finite, of any float dtype.

        Raises:
            RequestError: If embeddings are not finite.
        """
        if not embeddings.isfinite().all():
            raise RequestError(
                "embeddings have values that are not finite; expected numbers. Embed these texts again."
            )
        rows = embeddings.detach().cpu().split(max(1, _ELEMENTS // (self.roots * self.width)))
        return torch.cat([self._descend(stretch) for stretch in rows])

    def similarity(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the cosine of embeddings `[N, c]` with the nearest first-level centroid: `[N]`, float32.

        Topics of the first level are broad and have many windows. A leaf may have a single window, far from all other texts.
        """
        topics = self.centroids[0][self.takeable[0]]
        rows = torch.nn.functional.normalize(embeddings.detach().cpu().double(), dim=-1)
        return (rows @ torch.nn.functional.normalize(topics.double(), dim=-1).T).max(-1).values.float()

    def has_topic(self, embeddings: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
        """Return whether embeddings `[N, c]` belong to a topic, `[N]`, bool; `paths` are those of `paths`.

        An embedding with a topic reaches `min_similarity`, and the limit of its first-level topic in `topic_limits`.
        """
        is_near = torch.ones(len(paths), dtype=torch.bool)
        if self.min_similarity is not None and self.min_similarity > -1:
            is_near &= self.similarity(embeddings) >= self.min_similarity
        if self.topic_limits is not None:
            limits = torch.tensor([-torch.inf if limit is None else limit for limit in self.topic_limits])
            topics = paths[:, 0]
            is_near &= self.topic_similarity(embeddings, topics) >= limits[topics]
        return is_near

    def topic_similarity(self, embeddings: torch.Tensor, topics: torch.Tensor) -> torch.Tensor:
        """Return the cosine of embeddings `[N, c]` with their first-level topics `[N]`: `[N]`, float32."""
        rows = embeddings.detach().cpu().double()
        return torch.nn.functional.cosine_similarity(rows, self.centroids[0][topics].double(), dim=-1).float()

    def without(self, nodes: Iterable[tuple[int, int]]) -> "ClusterTree | None":
        """Return the tree without some nodes (level from 1, number) and all below, or None if no leaf is left.

        It is grown from this one; other nodes keep their numbers.
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
        limits = self.topic_limits
        if limits is not None:
            is_gone = centroids[0].isnan().any(-1).tolist()
            limits = [None if gone else limit for gone, limit in zip(is_gone, limits, strict=True)]
        return ClusterTree(self.branching, centroids, self.origin, sizes, self.min_similarity, lineage, limits)

    def save(self, folder: str | Path) -> None:
        """Write `tree.safetensors` and `tree.json` into a new folder, each whole or not at all."""
        folder = Path(folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "format_version": FORMAT_VERSION,
            "branching": self.branching,
            "levels": self.levels,
            "width": self.width,
            "roots": self.roots,
            "fingerprint": self.fingerprint,
            **dataclasses.asdict(self.origin),
            "grown_from": list(self.grown_from),
            "min_similarity": self.min_similarity,
            "topic_limits": self.topic_limits,
            "sizes": None if self.sizes is None else [level.tolist() for level in self.sizes],
        }
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in for_record(record).items())
        tensors = {f"centroids.{number}": level.contiguous() for number, level in enumerate(self.centroids, 1)}
        with atomic_write(folder / CENTROIDS_FILE) as partial:
            save_file(tensors, partial, metadata={"format": "pt"})
        with atomic_write(folder / RECORD_FILE) as partial:
            partial.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "ClusterTree":
        """Read the tree that `save` wrote into a folder, or that of a model whose bank has the tree's files.

        Raises:
            RequestError: If a file is missing, of another version, truncated or altered. The message names the folder.
        """
        folder = folder_of_tree(Path(folder).expanduser())
        try:
            text = (folder / RECORD_FILE).read_text(encoding="utf-8")
        except OSError as error:
            raise RequestError(
                f"tree is {str(folder)!r}, whose {RECORD_FILE} cannot be read ({error.strerror}); expected a folder that "
                "midus cluster build or ClusterTree.save wrote."
            ) from error
        try:
            record = parse_json(text)
            if record["format_version"] != FORMAT_VERSION:
                raise RequestError(f"its format_version is {record['format_version']}; expected {FORMAT_VERSION}")
            tensors = load_file(folder / CENTROIDS_FILE)
            record.setdefault("topic_quantile", None)  # which earlier versions did not write
            origin = {field.name: record[field.name] for field in dataclasses.fields(TreeOrigin)}
            homes = {key: os.path.expanduser(value) for key, value in origin.items() if str(value).startswith("~/")}
            tree = cls(
                record["branching"],
                [tensors[f"centroids.{level}"] for level in range(1, len(tensors) + 1)],
                TreeOrigin(**{**origin, **homes}),
                None if record["sizes"] is None else [torch.tensor(level) for level in record["sizes"]],
                record.get("min_similarity"),
                record["grown_from"],
                record.get("topic_limits"),
            )
            if tree.fingerprint != record["fingerprint"]:
                raise RequestError(f"the fingerprint of its centroids is not the one in {RECORD_FILE}")
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            raise RequestError(
                f"the tree in {str(folder)!r} was altered or is not whole: {first_line(error).removesuffix('.')}. Copy it again, or "
                "build the tree again."
            ) from error
        return tree

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


def _is_limit(value: float | None) -> bool:
    """Return whether a value is a cosine, or None for no limit."""
    return value is None or (type(value) in (int, float) and -1 <= value <= 1)


def _check_limits(limits: Sequence[float | None], roots: int) -> list[float | None]:
    """Return the limits of a tree's topics, each of which is a cosine or None."""
    if len(limits) != roots or not all(map(_is_limit, limits)):
        raise RequestError(
            f"topic_limits are {str(limits)[:80]}; expected {roots}, each a cosine from -1 to 1, or null for no limit. Build the "
            "tree again."
        )
    return [*limits]


def _takeable(centroids: Sequence[torch.Tensor], branching: int) -> list[torch.Tensor]:
    """Return per level whether each node leads to a leaf with data, `[roots * branching ** l]`, bool."""
    takeable = [~level[:, 0].isnan() for level in centroids]
    for parents, children in reversed(list(itertools.pairwise(takeable))):
        parents &= children.unflatten(0, (-1, branching)).any(-1)
    return takeable


def folder_of_tree(folder: Path) -> Path:
    """Return the folder with a tree's files: itself, or a model's first bank that has them."""
    if (folder / RECORD_FILE).exists():
        return folder
    return next((path.parent for path in sorted(folder.glob(f"{BANKS_FOLDER}/*/{RECORD_FILE}"))), folder)


def lasting_name(name: str) -> str:
    """Return a name of a model or corpus that is valid in any directory: paths are absolute."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def squared_distances(embeddings: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Return squared L2 distances `[N, k]`, float32, to centroids `[k, c]` or `[N, k, c]`."""
    # In float64, so that distances do not depend on how many are computed at once.
    rows = embeddings.double()
    wide = centroids.double()
    products = rows @ wide.T if wide.dim() == 2 else (wide @ rows.unsqueeze(-1)).squeeze(-1)
    lengths = rows.square().sum(-1, keepdim=True)
    return (lengths - 2 * products + wide.square().sum(-1)).float()
