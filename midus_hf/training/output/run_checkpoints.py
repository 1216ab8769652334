"""Checkpoints in the output of a run: which are whole, which is the latest, and which are removed."""

import contextlib
import errno
import functools
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from midus_hf.files.checkpoint_files import BEGUN_CHECKPOINT, CHECKPOINT_NAME, MANIFEST_FILE, TRAINER_STATE
from midus_hf.files.manifest import Manifest, describe_files, first_damage, first_misfit
from midus_hf.files.run_files import is_of_checkpoint, remove_written
from midus_hf.files.whole_files import sync, whole_file

# Reason given for a checkpoint that a run was writing when the run ended.
UNFINISHED = "it was not written to its end"


def checkpoints(output: str | os.PathLike) -> dict[int, Path]:
    """Return the checkpoints in `output` by their steps, including unfinished ones."""
    output = Path(output)
    return {
        int(match[1]): path
        for path in (output.iterdir() if output.is_dir() else ())
        if (match := CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir()
    }


def last_checkpoint(output: str | os.PathLike) -> Path | None:
    """Return the latest checkpoint in `output` that was written to its end, or None; its files are not checked."""
    complete = {step: path for step, path in checkpoints(output).items() if is_complete(path)}
    return complete[max(complete)] if complete else None


def whole_checkpoint(output: str | os.PathLike, skipped: Collection[Path] = ()) -> tuple[Path | None, dict[Path, str]]:
    """Return the latest checkpoint whose files are as they were written, or None, and the damage of later checkpoints.

    Returns:
        The checkpoint, and why each later checkpoint is not whole, by path, latest first.
    """
    passed_over: dict[Path, str] = {}
    for _, path in sorted(checkpoints(output).items(), reverse=True):
        if path not in skipped:
            damage = damage_of(path)
            if damage is None:
                return path, passed_over
            passed_over[path] = damage
    return None, passed_over


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end: its manifest is readable. Other files are not checked."""
    return manifest_of(checkpoint) is not None


def damage_of(checkpoint: Path) -> str | None:
    """Return one line about what is wrong with a checkpoint, or None if every file has the bytes that were written.

    All files of the manifest are read, once per process as long as their sizes and times do not change. Files that a
    user added are ignored.
    """
    if not (checkpoint / MANIFEST_FILE).exists():
        is_begun = (checkpoint / BEGUN_CHECKPOINT).exists() or not (checkpoint / TRAINER_STATE).exists()
        return UNFINISHED if is_begun else f"{MANIFEST_FILE} is missing"
    manifest = manifest_of(checkpoint)
    if manifest is None:
        return f"its {MANIFEST_FILE} is damaged"
    return _damage_as_it_lies(checkpoint, json.dumps(manifest), _appearance(checkpoint, manifest))


@functools.lru_cache(maxsize=256)
def _damage_as_it_lies(checkpoint: Path, manifest: str, appearance: tuple[tuple[int, ...], ...]) -> str | None:
    """Return the damage that `damage_of` returns; `appearance` is only a part of the cache key.

    A checkpoint whose files look the same as at an earlier call is not read again.
    """
    return first_damage(checkpoint, json.loads(manifest))


def _appearance(checkpoint: Path, manifest: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the size, times of change, inode and device of each file, which show whether a file has changed."""
    appearance: list[tuple[int, ...]] = []
    for name in manifest:
        try:
            status = (checkpoint / name).stat()
            appearance.append((status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev))
        except (OSError, ValueError):
            appearance.append(())
    return tuple(appearance)


def manifest_of(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if the manifest is missing or cannot be read."""
    manifest = _json_of(checkpoint / MANIFEST_FILE)
    return manifest if isinstance(manifest, dict) and TRAINER_STATE in manifest else None


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def begin_checkpoint(checkpoint: Path) -> frozenset[Path]:
    """Make the folder of a checkpoint, remove what a run wrote there before, and mark the checkpoint as being written.

    Returns:
        The files there that belong to the user.

    Raises:
        OSError: If the folder cannot be made or written.
    """
    if checkpoint.exists():
        remove_written(checkpoint.parent, checkpoint)
        for name in (MANIFEST_FILE, TRAINER_STATE):  # remove_written leaves links, which no run makes
            (checkpoint / name).unlink(missing_ok=True)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / BEGUN_CHECKPOINT).touch()
    return frozenset(
        path
        for path in checkpoint.rglob("*")
        if not path.is_dir() and not is_of_checkpoint(path.relative_to(checkpoint))
    )


def linked_entries(checkpoint: Path, earlier: Iterable[Path]) -> Manifest:
    """Return the manifest entries, by name, of a checkpoint's files that are links to earlier checkpoints' files.

    Entries come from the manifests of the earlier checkpoints, which were true when they were written. If a file was
    damaged since then, the damage is noticed when the file is read.
    """
    entries: Manifest = {}
    for folder in earlier:
        for name, entry in (manifest_of(folder) or {}).items():
            with contextlib.suppress(OSError):
                if (folder / name).stat().st_nlink > 1 and (folder / name).samefile(checkpoint / name):
                    entries[name] = entry
    return entries


def finish_checkpoint(checkpoint: Path, beside: Collection[Path] = (), linked: Manifest | None = None) -> None:
    """Force all files of a checkpoint to the disk, and then write the manifest that completes the checkpoint.

    Args:
        checkpoint: Folder of the checkpoint, into which all processes have written their parts.
        beside: The files there that belong to the user, from `begin_checkpoint`. Default: none.
        linked: Manifest entries, by name, of files whose contents are known from another checkpoint. Default: None, all
            files are read.

    Raises:
        OSError: If something cannot be written, or a file on the disk is not as it was written.
    """
    linked = linked or {}
    marks = {checkpoint / name for name in (MANIFEST_FILE, BEGUN_CHECKPOINT)}
    contents = sorted(checkpoint.rglob("*"))
    files = [path for path in contents if path.is_file() and path not in beside and path not in marks]
    files_to_read = [path for path in files if path.relative_to(checkpoint).as_posix() not in linked]
    manifest = {**describe_files(checkpoint, files_to_read), **linked}
    for path in files:
        sync(path)
    for folder in (*(path for path in contents if path.is_dir()), checkpoint, checkpoint.parent):
        sync(folder)
    with whole_file(checkpoint / MANIFEST_FILE) as partial:
        partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    (checkpoint / BEGUN_CHECKPOINT).unlink(missing_ok=True)
    misfit = first_misfit(checkpoint, manifest_of(checkpoint) or {})
    if misfit is not None or manifest_of(checkpoint) != manifest:
        raise OSError(errno.EIO, misfit or f"{MANIFEST_FILE} does not have the contents that were written")


def remove_old_checkpoints(output: Path, step: int, keep: int | None, best: int | None = None) -> None:
    """Remove checkpoints until `keep` are left: first unfinished ones and ones beyond `step`, then the oldest.

    Files that a user put into a checkpoint stay.

    Args:
        step: Current step of the run. A checkpoint beyond it was written before the run was resumed at an earlier step.
        keep: Number of checkpoints to keep; None keeps all.
        best: Step of a checkpoint to keep in addition. Default: None.
    """
    if keep is None:
        return
    removable = {number: path for number, path in checkpoints(output).items() if number != best}
    order = sorted(removable, key=lambda number: (number <= step and is_complete(removable[number]), number))
    for number in order[: max(len(order) - keep, 0)]:
        remove_written(output, removable[number])
