"""What a clustering that was interrupted has finished: the centroids of nodes, and the nodes that rows are in after a level.

Centroids are appended to a file as each node is done, each record with a digest of its own: of a run that was killed, whole records
count, and what is behind them is cut off. Rows are assigned again within the level that was interrupted alone.
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
    """Keeps the nodes that are done in a folder, and gives back those of a run with the same fingerprint.

    Args:
        folder: Where they are kept; it is made. What it holds of another fingerprint is deleted.
        fingerprint: Of all that centroids depend on: embeddings and options.
        branching: Children of a node.
        width: c.
        rows: Of the embeddings.
        read_only: Whether nothing of it is changed, as by several who read at the same time. Default: false.

    Raises:
        ValueError: If it is only read, and has nothing of this fingerprint.
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
                f"folder {str(folder)!r} has no centroids of these embeddings and options; expected those of ClusterLevel. Run it "
                "first, with the same options."
            )
        folder.mkdir(parents=True, exist_ok=True)
        if self._fingerprint() != fingerprint:
            self.delete()
            folder.mkdir()
            with whole_file(folder / _HEADER) as partial:
                partial.write_text(json.dumps({"fingerprint": fingerprint}) + "\n", encoding="utf-8")
        self._found = self._read_centroids()
        self._file = (folder / _CENTROIDS).open("rb" if read_only else "ab")
        self._levels = self._read_levels()

    def centroids(self, level: int, parent: int) -> torch.Tensor | None:
        """The centroids of a node's children, `[k, c]` float32; None if it was not done.

        Args:
            level: Of the children, from 1.
            parent: The node, in the level above.
        """
        return self._found.get((level, parent))

    def add(self, level: int, parent: int, centroids: torch.Tensor) -> None:
        """Keep what was found for a node.

        Args:
            level: As in `centroids`.
            parent: As in `centroids`.
            centroids: `[k, c]` float32.
        """
        record = np.zeros((), self._record)
        record["level"], record["parent"], record["count"] = level, parent, len(centroids)
        record["centroids"][: len(centroids)] = centroids.numpy()
        record["digest"] = _digest(record)
        self._file.write(record.tobytes())
        self._file.flush()

    def nodes(self, level: int) -> np.ndarray | None:
        """The node of each row, `[N]` int64; None if the level was not finished.

        A level whose rows were assigned in parts is finished when all parts are there.

        Args:
            level: From 1.
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
        """Keep where rows that follow one another are after a level; others may keep other rows at the same time.

        Args:
            level: From 1.
            first: The first of the rows.
            nodes: The node of each row, `[n]`.
        """
        path = self._folder / f"part.{level}.{first}-{first + len(nodes)}.npy"
        with whole_file(path) as partial, partial.open("wb") as file:
            np.save(file, nodes.astype(np.int32))

    def has_part(self, level: int, first: int, end: int) -> bool:
        """Whether `add_part` has kept the rows from one place to another."""
        return (self._folder / f"part.{level}.{first}-{end}.npy").exists()

    def _joined(self, level: int) -> np.ndarray | None:
        """The parts of a level in the order of rows; None if one is absent."""
        kept = []
        for path in sorted(self._folder.glob(f"part.{level}.*-*.npy")):
            first, end = map(int, path.name.split(".")[2].split("-"))
            kept.append((end, first, path))
        parts, place = [], 0
        while place < self._rows:
            # Runs of different numbers of tasks leave parts that overlap.
            here = [part for part in kept if part[1] <= place < part[0]]
            if not here:
                return None
            end, first, path = max(here)
            parts.append(np.load(path)[place - first :])
            place = end
        found = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return found.astype(np.int64) if len(found) == self._rows else None

    def finish_level(self, level: int, nodes: np.ndarray) -> None:
        """Keep where rows are after a level; what was kept of the levels above it follows from that.

        Args:
            level: From 1.
            nodes: The node of each row, `[N]`.
        """
        with whole_file(self._level_file(level)) as partial, partial.open("wb") as file:
            np.save(file, nodes.astype(np.int32))
        self._level_file(level - 1).unlink(missing_ok=True)
        for part in self._folder.glob(f"part.{level}.*-*.npy"):
            part.unlink()

    def close(self) -> None:
        """Close the file; what is kept stays."""
        self._file.close()

    def delete(self) -> None:
        """Delete all that is kept, and the folder."""
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def _fingerprint(self) -> str | None:
        try:
            found = parse_json((self._folder / _HEADER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found.get("fingerprint") if isinstance(found, dict) else None

    def _read_centroids(self) -> dict[tuple[int, int], torch.Tensor]:
        path = self._folder / _CENTROIDS
        found: dict[tuple[int, int], torch.Tensor] = {}
        if not path.exists():
            return found
        whole = 0
        for record in np.fromfile(path, self._record):
            if not np.array_equal(record["digest"], _digest(record)):
                break
            centroids = torch.from_numpy(record["centroids"][: record["count"]].copy())
            found[int(record["level"]), int(record["parent"])] = centroids
            whole += 1
        if not self._read_only:
            os.truncate(path, whole * self._record.itemsize)
        return found

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
