"""Manifests: names, sizes and digests of a folder's files, which reveal damage before the files are used."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# The entry of one file, `{"bytes": ..., "sha256": ...}`, by its path relative to the manifest's folder, with `/` between the parts.
Manifest = dict[str, dict[str, Any]]


def describe_files(folder: Path, paths: Iterable[Path]) -> Manifest:
    """Return the manifest of some files inside a folder, from which the names in the manifest start."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(paths)
    }


def first_damage(folder: Path, manifest: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return one line about the first file that differs from its entry in the manifest, or None if every file agrees.

    Names and sizes of all files are compared before any file is read. Files that the manifest does not name are ignored.
    """
    name = ""
    try:
        for name, entry in manifest.items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
        for name, entry in manifest.items():
            if _sha256(folder / name) != entry["sha256"]:
                return f"{name} does not have the contents that were written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    except (AttributeError, KeyError, TypeError, ValueError):
        return "its manifest is damaged"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
