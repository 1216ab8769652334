"""The two files of a tree: `tree.safetensors` has the centroids, and `tree.json` describes the tree and its origin."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from midus_hf.config.fetched_blocks import BANKS_FOLDER, TREE_FILES
from midus_hf.config.wording import first_line
from midus_hf.files.json_text import parse_json
from midus_hf.files.outputs import whole_file
from midus_hf.files.secrets import for_record

FORMAT_VERSION = 2
CENTROIDS_FILE, RECORD_FILE = TREE_FILES


@dataclass(frozen=True)
class TreeOrigin:
    """Models, settings and seed that a tree was built with; None for what is unknown.

    Args:
        embedding_model: Folder or hub id of the model that embeds texts. Default: None.
        embedding_fingerprint: The model's `TextEmbedder.fingerprint`. Default: None.
        embedding_max_tokens: Most tokens of a text that the model reads. Default: None.
        tokenizer: Folder or hub id of the tokenizer that cut windows. Default: None.
        window_tokens: Tokens per window, counted by that tokenizer. Default: None.
        seed: Seed of all random choices. Default: None.
    """

    embedding_model: str | None = None
    embedding_fingerprint: str | None = None
    embedding_max_tokens: int | None = None
    tokenizer: str | None = None
    window_tokens: int | None = None
    seed: int | None = None


def check_similarity(min_similarity: object) -> float | None:
    """Return a least similarity as a float, or None; anything but a cosine or None is an error."""
    if min_similarity is None:
        return None
    if (
        isinstance(min_similarity, bool)
        or not isinstance(min_similarity, int | float)
        or not -1 <= min_similarity <= 1
    ):
        raise ValueError(
            f"min_similarity is {min_similarity!r}; expected a cosine from -1, which every text reaches, to 1, or null for no limit."
        )
    return float(min_similarity)


def lasting_name(name: str) -> str:
    """Return the name of a model or corpus that stays valid in other working directories: a path as an absolute one."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def fingerprint_of(branching: int, centroids: Sequence[torch.Tensor]) -> str:
    """Return the SHA-256 of the branching, as 8 bytes, and of the bytes of all centroids; all numbers are little-endian."""
    digest = hashlib.sha256(branching.to_bytes(8, "little"))
    for level in centroids:
        digest.update(level.contiguous().numpy().astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


def write_tree(folder: str | Path, centroids: Sequence[torch.Tensor], record: Mapping[str, Any]) -> None:
    """Write both files of a tree, the record last. Each file appears complete or not at all."""
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(value)}"
        for key, value in for_record({"format_version": FORMAT_VERSION, **record}).items()
    )
    tensors = {f"centroids.{number}": level.contiguous() for number, level in enumerate(centroids, 1)}
    with whole_file(folder / CENTROIDS_FILE) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    with whole_file(folder / RECORD_FILE) as partial:
        partial.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def read_tree(folder: str | Path) -> dict[str, Any]:
    """Return the arguments of a `ClusterTree` from both files, in their folder or in that of a model whose bank has them."""
    path = folder_of_tree(Path(folder).expanduser()) / RECORD_FILE
    record = _read_record(path)
    if record.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"file {str(path)!r} has format_version {record.get('format_version')!r}; expected {FORMAT_VERSION}. "
            "Build the tree again, or read it with the version of midus_hf that wrote it."
        )
    file = path.with_name(CENTROIDS_FILE)
    try:
        tensors = load_file(file)
        centroids = [tensors[f"centroids.{level}"].float() for level in range(1, len(tensors) + 1)]
    except (OSError, SafetensorError, KeyError) as error:
        raise altered(file, first_line(error)) from error
    try:
        sizes, branching = record["sizes"], int(record["branching"])
        arguments = {
            "branching": branching,
            "centroids": centroids,
            "origin": TreeOrigin(
                **{field.name: _expanded(record[field.name]) for field in dataclasses.fields(TreeOrigin)}
            ),
            "sizes": None if sizes is None else [torch.tensor(level, dtype=torch.int64) for level in sizes],
            "min_similarity": check_similarity(record.get("min_similarity")),
            "grown_from": [str(fingerprint) for fingerprint in record["grown_from"]],
        }
        fingerprint = fingerprint_of(branching, centroids)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise altered(path, f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)) from error
    if fingerprint != record.get("fingerprint"):
        raise altered(file, f"its fingerprint is not the one in {RECORD_FILE}")
    return arguments


def folder_of_tree(folder: Path) -> Path:
    """Return the folder with a tree's files: the folder itself, or a model's first bank that has them."""
    if (folder / RECORD_FILE).exists():
        return folder
    return next((path.parent for path in sorted(folder.glob(f"{BANKS_FOLDER}/*/{RECORD_FILE}"))), folder)


def altered(path: Path, reason: str) -> ValueError:
    """Return the error for a file of a tree that is not as it was written."""
    return ValueError(
        f"file {str(path)!r} was altered or is not whole: {reason}. Copy it again, or build the tree again."
    )


def _expanded(value: Any) -> Any:
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"tree is {str(path.parent)!r}, whose {RECORD_FILE} cannot be read ({error.strerror}); expected a folder that "
            "midus cluster build or ClusterTree.save wrote."
        ) from error
    except ValueError as error:
        raise altered(path, f"it is not JSON: {first_line(error)}") from error
    if not isinstance(record, dict):
        raise altered(path, f"it holds a {type(record).__name__} in place of an object")
    return record
