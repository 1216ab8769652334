"""Finished parts of an interrupted clustering: the centroids of nodes, and the node of each row after a level.

As each node is done, its centroids are appended to a file as a record with a digest. After a kill, complete records
count, and the incomplete rest is cut off. Only the rows of the interrupted level are assigned again.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch

from midus_hf.files.json_text import parse_json
from midus_hf.files.whole_files import whole_file

_HEADER = "clustering.json"
_CENTROIDS = "centroids.bin"
_DIGEST_BYTES = 16


class FinishedNodes:
    """A folder of finished nodes, which a later run with the same fingerprint can reuse.

    Args:
        folder: The folder, which is created. Contents with another fingerprint are deleted.
        fingerprint: Fingerprint of everything that the centroids depend on: embeddings and options.
        branching: Number of children per node.
        width: Width c of the embeddings.
        rows: Number of embeddings.
        read_only: Whether to change nothing that is stored, so that several processes may read at once. Default: false.

    Raises:
        ValueError: If `read_only` is true and the folder has nothing with this fingerprint.
    """

    def __init__(self, folder: Path, fingerprint: str, branching: int, width: int, rows: int, read_only: bool = False):
        self._folder, self._branching, self._rows, self._read_only = folder, branching, rows, read_only
        self._record = np.dtype(
            [
                ("level", "<i8"),
                ("parent", "<i8"),
                ("count", "<i8"),
                ("centroids", "<f4", (branching, width)),
                ("digest", "u1", (_DIGEST_BYTES,)),
            ]
        )
        if read_only and self._fingerprint() != fingerprint:
            raise ValueError(
                f"folder {str(folder)!r} has no centroids of these embeddings and options; expected the centroids that ClusterLevel "
                "computes. Run it first, with the same options."
            )
        folder.mkdir(parents=True, exist_ok=True)
        if self._fingerprint() != fingerprint:
            self.delete()
            folder.mkdir()
            with whole_file(folder / _HEADER) as partial:
                partial.write_text(json.dumps({"fingerprint": fingerprint}) + "\n", encoding="utf-8")
        self._centroids = self._read_centroids()
        self._file = (folder / _CENTROIDS).open("rb" if read_only else "ab")
        self._levels = self._read_levels()

    def centroids(self, level: int, parent: int) -> torch.Tensor | None:
        """Return the centroids of a node's children, `[k, c]`, float32; None if the node is not done.

        Args:
            level: Level of the children, from 1.
            parent: The node, in the level above.
        """
        return self._centroids.get((level, parent))

    def add(self, level: int, parent: int, centroids: torch.Tensor) -> None:
        """Store the centroids of a node's children.

        Args:
            level: Level of the children, from 1.
            parent: The node, in the level above.
            centroids: Centroids `[k, c]`, float32.
        """
        record = np.zeros((), self._record)
        record["level"], record["parent"], record["count"] = level, parent, len(centroids)
        record["centroids"][: len(centroids)] = centroids.numpy()
        record["digest"] = _digest(record)
        self._file.write(record.tobytes())
        self._file.flush()

    def nodes(self, level: int) -> np.ndarray | None:
        """Return the node of each row at a level, `[N]`, int64; None if the level is not finished.

        A level whose rows were assigned in parts is finished once all parts are there.

        Args:
            level: The level, from 1.
        """
        if self._levels is None or self._levels[0] < level:
            joined = self._joined(level)
            if joined is None:
                return None
            self._levels = (level, joined)
            if not self._read_only:
                self.finish_level(level, joined)
        last, nodes = self._levels
        return nodes // self._branching ** (last - level)

    def add_part(self, level: int, first: int, nodes: np.ndarray) -> None:
        """Store the nodes of consecutive rows at a level. Other processes may store other rows at the same time.

        Args:
            level: The level, from 1.
            first: Index of the first row.
            nodes: The node of each row, `[n]`.
        """
        path = self._folder / f"part.{level}.{first}-{first + len(nodes)}.npy"
        with whole_file(path) as partial, partial.open("wb") as file:
            np.save(file, nodes.astype(np.int32))

    def has_part(self, level: int, first: int, end: int) -> bool:
        """Return whether `add_part` has stored exactly the rows from `first` to `end` (exclusive)."""
        return (self._folder / f"part.{level}.{first}-{end}.npy").exists()

    def _joined(self, level: int) -> np.ndarray | None:
        """Return the joined parts of a level, in the order of rows; None if rows are missing."""
        stored = []
        for path in sorted(self._folder.glob(f"part.{level}.*-*.npy")):
            first, end = map(int, path.name.split(".")[2].split("-"))
            stored.append((end, first, path))
        parts, row = [], 0
        while row < self._rows:
            # Parts may overlap if runs had different numbers of tasks.
            covering = [part for part in stored if part[1] <= row < part[0]]
            if not covering:
                return None
            end, first, path = max(covering)
            parts.append(np.load(path)[row - first :])
            row = end
        nodes = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return nodes.astype(np.int64) if len(nodes) == self._rows else None

    def finish_level(self, level: int, nodes: np.ndarray) -> None:
        """Store the node of each row at a level, and delete what follows from it: the level's parts, and the level above.

        Args:
            level: The level, from 1.
            nodes: The node of each row, `[N]`.
        """
        with whole_file(self._level_file(level)) as partial, partial.open("wb") as file:
            np.save(file, nodes.astype(np.int32))
        self._level_file(level - 1).unlink(missing_ok=True)
        for part in self._folder.glob(f"part.{level}.*-*.npy"):
            part.unlink()

    def close(self) -> None:
        """Close the file; the folder keeps its contents."""
        self._file.close()

    def delete(self) -> None:
        """Delete the folder with its contents."""
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def _fingerprint(self) -> str | None:
        try:
            header = parse_json((self._folder / _HEADER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return header.get("fingerprint") if isinstance(header, dict) else None

    def _read_centroids(self) -> dict[tuple[int, int], torch.Tensor]:
        path = self._folder / _CENTROIDS
        centroids_of: dict[tuple[int, int], torch.Tensor] = {}
        if not path.exists():
            return centroids_of
        num_whole = 0
        for record in np.fromfile(path, self._record):
            if not np.array_equal(record["digest"], _digest(record)):
                break
            centroids = torch.from_numpy(record["centroids"][: record["count"]].copy())
            centroids_of[int(record["level"]), int(record["parent"])] = centroids
            num_whole += 1
        if not self._read_only:
            os.truncate(path, num_whole * self._record.itemsize)
        return centroids_of

    def _read_levels(self) -> tuple[int, np.ndarray] | None:
        levels = sorted(int(path.name.split(".")[1]) for path in self._folder.glob("nodes.*.npy"))
        if not levels:
            return None
        nodes = np.load(self._level_file(levels[-1]))
        return (levels[-1], nodes.astype(np.int64)) if len(nodes) == self._rows else None

    def _level_file(self, level: int) -> Path:
        return self._folder / f"nodes.{level}.npy"


def _digest(record: np.ndarray | np.void) -> np.ndarray:
    content = np.asarray(record).tobytes()[:-_DIGEST_BYTES]
    return np.frombuffer(hashlib.sha256(content).digest()[:_DIGEST_BYTES], np.uint8)
