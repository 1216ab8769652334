"""Which files hold text, by their names: one, or those of a folder, compressed or not."""

import collections
import os
from pathlib import Path

from midus_hf.documents.document_error import DocumentError

FOLDER_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
"""Endings of the files that are read from a folder; all but the last also with one of `COMPRESSIONS` after them."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""What an ending says of how a file is compressed."""

_ENDINGS_NAMED = 5


def find_files(path: str | Path) -> list[Path]:
    """The files to read: `path` itself, or those of the folder `path` that hold text, in the order of their paths.

    Args:
        path: A file or a folder.

    Raises:
        DocumentError: If the path is empty or does not exist, or is a folder without such files.
    """
    if path == "":
        raise DocumentError("text is ''; expected a file or a folder.")
    path = Path(path).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DocumentError(f"text is {str(path)!r}, which does not exist; expected a file or a folder.")
    files = [file for file in walk_files(path) if _is_read(file)]
    if not files:
        raise DocumentError(
            f"text is {str(path)!r}, a folder without text; expected files ending in {', '.join(FOLDER_SUFFIXES)}."
        )
    return files


def describe_files(path: str | Path) -> str | None:
    """One line on how many files of a folder are read, and of what kinds the others are; None if `path` is no folder.

    Args:
        path: As in `find_files`.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        return None
    files = walk_files(path)
    others = collections.Counter(_ending(file) for file in files if not _is_read(file))
    line = f"read {len(files) - others.total():,} of {len(files):,} files of {path}"
    if not others:
        return line
    named = [f"{count:,} {ending}" for ending, count in others.most_common(_ENDINGS_NAMED)]
    if unnamed := others.total() - sum(count for _, count in others.most_common(_ENDINGS_NAMED)):
        named.append(f"{unnamed:,} with other endings")
    return f"{line}; not read: {', '.join(named)} (expected {', '.join(FOLDER_SUFFIXES)})"


def endings(path: Path) -> tuple[str, str]:
    """The ending of a file's name, and the one behind it that says how it is compressed, as in `(".jsonl", ".gz")`.

    Args:
        path: The file, which need not exist.

    Returns:
        Both may be empty.
    """
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return Path(path.name.removesuffix(compression)).suffix, compression


def is_text_name(path: Path) -> bool:
    """Whether a folder's file of this name is read.

    Args:
        path: The file, which need not exist.
    """
    suffix, compression = endings(path)
    if compression:
        return suffix == ".json" or (suffix in FOLDER_SUFFIXES and suffix != ".parquet")
    return suffix in FOLDER_SUFFIXES


def is_compressed(path: Path) -> bool:
    """Whether the text in a file takes more room than the file.

    Args:
        path: The file.
    """
    suffix, compression = endings(path)
    return bool(compression) or suffix == ".parquet"


def walk_files(folder: Path) -> list[Path]:
    """All files below a folder, without what is hidden, and the linked folders, which are not entered.

    Args:
        folder: An existing one.
    """
    found: list[Path] = []
    for place, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        linked = [name for name in subfolders if Path(place, name).is_symlink()]
        found += [Path(place, name) for name in (*names, *linked) if not name.startswith(".")]
    return sorted(found)


def _is_read(path: Path) -> bool:
    return is_text_name(path) and not path.is_dir()


def _ending(path: Path) -> str:
    if path.is_dir():
        return "linked folder"
    return "".join(endings(path)) or "without an ending"
