"""Recognises the folder of a run by the options in it, and the files that a run wrote by their names. Only these are removed."""

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from midus_hf.config.fetched_blocks import BANK_DESCRIPTION, BANKS_FOLDER
from midus_hf.files.checkpoint_files import (
    BEGUN_CHECKPOINT,
    CHECKPOINT_NAME,
    CONFIG_FILE,
    EVENTS_FOLDER,
    INDEX_FILE,
    MANIFEST_FILE,
    OF_CHECKPOINT,
    OF_OUTPUT,
    PARTIAL_MODEL,
    RUN_CONFIG,
    TEMPLATES_FOLDER,
    TRAINER_STATE,
    indexed_weights,
    is_of,
)

# First line of the options in a run's output, which marks the folder as a run's.
RUN_MARK = (
    "# The options of the run that wrote this folder, which a later run may overwrite (midus train, midus sft).\n"
)

_FOLDERS = (PARTIAL_MODEL, EVENTS_FOLDER, TEMPLATES_FOLDER, BANKS_FOLDER)

# Files that mark something as complete. They are removed first, in this order.
_VOUCHING = (MANIFEST_FILE, TRAINER_STATE, CONFIG_FILE, BANK_DESCRIPTION)

# Files that mark a checkpoint as incomplete, or other files as a run's. They are removed last.
_TELLING = (BEGUN_CHECKPOINT, INDEX_FILE, RUN_CONFIG)


def is_of_a_run(output: Path) -> bool:
    """Return whether a run has begun to write a folder: whether the options there begin with the mark of a run."""
    try:
        with (output / RUN_CONFIG).open("rb") as file:
            return file.read(len(RUN_MARK.encode())) == RUN_MARK.encode()
    except OSError:
        return False


def foreign_files(output: str | os.PathLike) -> list[str]:
    """Return the paths in a run's output that no run wrote, in order and relative to the output; folders end in a slash.

    Links never count as written by a run.
    """
    output = Path(output)
    shards = indexed_weights(output)
    foreign: list[str] = []
    for path in sorted(output.iterdir()):
        if not _is_folder(path):
            inside = [path]
        elif path.name in _FOLDERS or CHECKPOINT_NAME.fullmatch(path.name):
            inside = sorted(entry for entry in path.rglob("*") if not _is_folder(entry))
        else:
            foreign.append(f"{path.name}/")
            continue
        foreign += [str(entry.relative_to(output)) for entry in inside if not _is_ours(entry, output, shards)]
    return foreign


def is_of_checkpoint(path: str | os.PathLike) -> bool:
    """Return whether a file's name, relative to the folder of the checkpoint, is one that runs use in their checkpoints."""
    return is_of(Path(path), OF_CHECKPOINT)


def remove_written(output: str | os.PathLike, path: str | os.PathLike) -> bool:
    """Remove the files that a run wrote at a path, and folders that become empty; return whether nothing is left at the path.

    Files that cannot be removed stay. Before anything else of a checkpoint is removed, its manifest is renamed to the mark of
    an incomplete checkpoint. The mark is removed last, so a checkpoint whose removal was interrupted is never taken for a
    complete one.

    Args:
        output: Folder of the run, which itself is never removed.
        path: The output, or a path inside it, which need not exist.
    """
    return _remove(Path(path), Path(output), indexed_weights(Path(output)))


def _remove(path: Path, output: Path, shards: Collection[str]) -> bool:
    if not os.path.lexists(path):
        return True
    try:
        if path == output or _is_folder(path):
            if CHECKPOINT_NAME.fullmatch(path.name) and _is_ours(path / MANIFEST_FILE, output, shards):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(path / MANIFEST_FILE, path / BEGUN_CHECKPOINT)
            removed = [_remove(entry, output, shards) for entry in sorted(path.iterdir(), key=_rank)]
            if path == output or not all(removed):
                return False
            path.rmdir()
        elif _is_ours(path, output, shards):
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return not os.path.lexists(path)


def _rank(path: Path) -> tuple[bool, int, str]:
    vouching = _VOUCHING.index(path.name) if path.name in _VOUCHING else len(_VOUCHING)
    return path.name in _TELLING, vouching, path.name


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_ours(path: Path, output: Path, shards: Collection[str]) -> bool:
    """Return whether a run writes a file of this name at this path. A path through a link is never a run's."""
    parts = path.relative_to(output).parts
    if any(output.joinpath(*parts[:depth]).is_symlink() for depth in range(1, len(parts) + 1)):
        return False
    if CHECKPOINT_NAME.fullmatch(parts[0]):
        return is_of_checkpoint(Path(*parts[1:]))
    if parts[0] == PARTIAL_MODEL:
        return True
    return is_of(Path(*parts), OF_OUTPUT) or (len(parts) == 1 and parts[0] in shards)
