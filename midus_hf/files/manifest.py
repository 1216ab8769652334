"""Manifests: names, sizes and digests of a folder's files, which reveal damage before the files are used."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypedDict


class FileEntry(TypedDict):
    """Entry of a manifest for one file."""

    bytes: int
    sha256: str


# Entries by the path of each file relative to the manifest's folder, with `/` between the parts.
Manifest = dict[str, FileEntry]


def describe_files(folder: Path, paths: Iterable[Path]) -> Manifest:
    """Return the manifest of some files inside a folder, from which the names in the manifest start."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(bytes=path.stat().st_size, sha256=file_sha256(path))
        for path in sorted(paths)
    }


def first_damage(folder: Path, manifest: Mapping[str, FileEntry]) -> str | None:
    """Return one line about the first file that differs from its entry in the manifest, or None if every file agrees.

    Names and sizes of all files are compared before any file is read. Files that the manifest does not name are ignored.
    """
    return first_misfit(folder, manifest) or _first_line(folder, manifest, _other_contents)


def first_misfit(folder: Path, manifest: Mapping[str, FileEntry]) -> str | None:
    """Return one line about the first file that is missing or differs in size from its entry, or None. No file is read."""
    return _first_line(folder, manifest, _other_size)


def _other_size(path: Path, entry: FileEntry) -> str | None:
    size = path.stat().st_size
    return None if size == entry["bytes"] else f"has {size:,} bytes instead of {entry['bytes']:,}"


def _other_contents(path: Path, entry: FileEntry) -> str | None:
    return None if file_sha256(path) == entry["sha256"] else "does not have the contents that were written"


def _first_line(
    folder: Path, manifest: Mapping[str, FileEntry], difference: Callable[[Path, FileEntry], str | None]
) -> str | None:
    try:
        for name, entry in manifest.items():
            line = difference(folder / name, entry)
            if line is not None:
                return f"{name} {line}"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    except (AttributeError, KeyError, TypeError, ValueError):
        return "its manifest is damaged"
    return None


def file_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
