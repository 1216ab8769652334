"""Names of files that hold text, compressed or not, and the search for them in a folder."""

import collections
import os
from pathlib import Path

from midus_hf.documents.document_error import DocumentError

# Endings of the files that are read from a folder. All but the last may be followed by one of `COMPRESSIONS`.
FOLDER_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")

# Compression formats by the ending of a file's name.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

_ENDINGS_NAMED = 5


def find_files(path: str | Path) -> list[Path]:
    """Return the files to read: `path` itself, or the text files in the folder `path`, in the order of their paths.

    Args:
        path: A file or a folder.

    Raises:
        DocumentError: If the path is empty or does not exist, or is a folder without text files.
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
    """Return one line on how many files of a folder are read, and which kinds are not; None if `path` is not a folder.

    Args:
        path: A file or a folder, as in `find_files`.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        return None
    files = walk_files(path)
    others = collections.Counter(_ending(file) for file in files if not _is_read(file))
    line = f"read {len(files) - others.total():,} of {len(files):,} files of {path}"
    if not others:
        return line
    phrases = [f"{count:,} {ending}" for ending, count in others.most_common(_ENDINGS_NAMED)]
    if unnamed := others.total() - sum(count for _, count in others.most_common(_ENDINGS_NAMED)):
        phrases.append(f"{unnamed:,} with other endings")
    return f"{line}; not read: {', '.join(phrases)} (expected {', '.join(FOLDER_SUFFIXES)})"


def endings(path: Path) -> tuple[str, str]:
    """Return the ending of a file's name, and the ending after it that names a compression, such as `(".jsonl", ".gz")`.

    Either may be empty.

    Args:
        path: Path of the file, which need not exist.
    """
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return Path(path.name.removesuffix(compression)).suffix, compression


def is_text_name(path: Path) -> bool:
    """Return whether a file of this name is read if it lies in a folder.

    Args:
        path: Path of the file, which need not exist.
    """
    suffix, compression = endings(path)
    if compression:
        return suffix == ".json" or (suffix in FOLDER_SUFFIXES and suffix != ".parquet")
    return suffix in FOLDER_SUFFIXES


def is_compressed(path: Path) -> bool:
    """Return whether a file's text takes more space than the file: whether the file is compressed, or Parquet."""
    suffix, compression = endings(path)
    return bool(compression) or suffix == ".parquet"


def walk_files(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted, without hidden ones. Linked folders are returned like files and not entered.

    Args:
        folder: An existing folder.
    """
    files: list[Path] = []
    for folder_path, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        linked = [name for name in subfolders if Path(folder_path, name).is_symlink()]
        files += [Path(folder_path, name) for name in (*names, *linked) if not name.startswith(".")]
    return sorted(files)


def _is_read(path: Path) -> bool:
    return is_text_name(path) and not path.is_dir()


def _ending(path: Path) -> str:
    if path.is_dir():
        return "linked folder"
    return "".join(endings(path)) or "without an ending"
