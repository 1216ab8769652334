"""Manifests: the names, sizes and digests of a folder's files, by which damage is known before the files are believed."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict


class FileEntry(TypedDict):
    """What a manifest holds of one file."""

    bytes: int
    sha256: str


Manifest = dict[str, FileEntry]
"""By the path of each file relative to its folder, with `/` between the parts."""


def describe_files(folder: Path, paths: Iterable[Path]) -> Manifest:
    """Return the manifest of some files of a folder.

    Args:
        folder: The folder that the names in the manifest start from.
        paths: The files, all of them inside the folder.

    Raises:
        OSError: If a file cannot be read.
    """
    return {
        path.relative_to(folder).as_posix(): FileEntry(bytes=path.stat().st_size, sha256=file_sha256(path))
        for path in sorted(paths)
    }


def first_damage(folder: Path, manifest: Mapping[str, FileEntry]) -> str | None:
    """Return one line about the first file that differs from its entry in the manifest, or None if every file agrees.

    Names and sizes of all files are compared before any file is read. Files that the manifest does not name are ignored.

    Args:
        folder: The folder of the files.
        manifest: As `describe_files` returned it, or as JSON gave it back.
    """
    try:
        for name, entry in manifest.items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
        for name, entry in manifest.items():
            if file_sha256(folder / name) != entry["sha256"]:
                return f"{name} does not have the contents that were written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    except (AttributeError, KeyError, TypeError, ValueError):
        return "its manifest is damaged"
    return None


def file_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 digest of a file's bytes.

    Args:
        path: The path of the file.

    Raises:
        OSError: If the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
