"""The checkpoints that lie in the output of a run: which are whole, which is the latest, which have had their time."""

import contextlib
import errno
import functools
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from midus_hf.files.checkpoint_files import BEGUN_CHECKPOINT, CHECKPOINT_NAME, MANIFEST_FILE, TRAINER_STATE
from midus_hf.files.manifest import FileEntry, Manifest, describe_files, first_damage, first_misfit
from midus_hf.files.run_files import is_of_checkpoint, remove_written
from midus_hf.files.whole_files import sync, whole_file

UNFINISHED = "it was not written to its end"
"""What is said of a checkpoint that a run was writing when it ended."""


def checkpoints(output: str | os.PathLike) -> dict[int, Path]:
    """Return the checkpoints in `output` by their steps, those included that were not written to their end."""
    output = Path(output)
    return {
        int(match[1]): path
        for path in (output.iterdir() if output.is_dir() else ())
        if (match := CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir()
    }


def last_checkpoint(output: str | os.PathLike) -> Path | None:
    """Return the latest checkpoint in `output` that was written to its end, or None; its files are not read."""
    complete = {step: path for step, path in checkpoints(output).items() if is_complete(path)}
    return complete[max(complete)] if complete else None


def whole_checkpoint(output: str | os.PathLike, skipped: Collection[Path] = ()) -> tuple[Path | None, dict[Path, str]]:
    """Return the latest checkpoint whose files are those that were written, or None, and what is wrong with later ones.

    Args:
        output: The folder of the run.
        skipped: Checkpoints that are not considered. Default: none.

    Returns:
        The checkpoint, and by path, latest first, why each later one is not whole.
    """
    passed_over: dict[Path, str] = {}
    for _, path in sorted(checkpoints(output).items(), reverse=True):
        if path in skipped:
            continue
        damage = damage_of(path)
        if damage is None:
            return path, passed_over
        passed_over[path] = damage
    return None, passed_over


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end: its manifest is there and can be read. Its other files are not looked at.

    Args:
        checkpoint: Its folder.
    """
    return manifest_of(checkpoint) is not None


def is_of_earlier_version(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end by a version that wrote no manifests.

    Args:
        checkpoint: Its folder.
    """
    if any((checkpoint / name).exists() for name in (MANIFEST_FILE, BEGUN_CHECKPOINT)):
        return False
    return isinstance(_json_of(checkpoint / TRAINER_STATE), dict)


def missing_of_earlier_version(checkpoint: Path) -> str | None:
    """Return one line about a file without which a Trainer would silently go on from less than a checkpoint, or None.

    It is asked of checkpoints that have no manifest.

    Args:
        checkpoint: Its folder.
    """
    by_deepspeed = any(checkpoint.glob("global_step*"))
    needed = {
        "optimizer.pt": by_deepspeed or any(checkpoint.glob("optimizer*")),
        "scheduler.pt": by_deepspeed or (checkpoint / "scheduler.pt").exists(),
        "rng_state.pth": any(checkpoint.glob("rng_state*.pth")),
    }
    return next((f"{name} is missing" for name, is_there in needed.items() if not is_there), None)


def damage_of(checkpoint: Path) -> str | None:
    """Return one line about what is wrong with a checkpoint, or None if every file has the bytes that were written.

    All of its files are read, once in a process for as long as nothing about them changes. Files that a person put beside them
    are ignored.

    Args:
        checkpoint: Its folder.
    """
    if not (checkpoint / MANIFEST_FILE).exists():
        if is_of_earlier_version(checkpoint):
            return f"it has no {MANIFEST_FILE}, as those of earlier versions"
        return UNFINISHED
    manifest = manifest_of(checkpoint)
    if manifest is None:
        return f"its {MANIFEST_FILE} is damaged"
    return _damage_as_it_lies(checkpoint, json.dumps(manifest), _appearance(checkpoint, manifest))


@functools.lru_cache(maxsize=256)
def _damage_as_it_lies(checkpoint: Path, manifest: str, appearance: tuple[tuple[int, ...], ...]) -> str | None:
    """As `damage_of`; the appearance of the files is a part of the question, since what looks the same is not read again."""
    return first_damage(checkpoint, json.loads(manifest))


def _appearance(checkpoint: Path, manifest: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return size, time of change and number of each file, which tell whether one has changed since it was read."""
    found: list[tuple[int, ...]] = []
    for name in manifest:
        try:
            status = (checkpoint / name).stat()
            found.append((status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev))
        except (OSError, ValueError):
            found.append(())
    return tuple(found)


def manifest_of(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if there is none that can be read.

    Args:
        checkpoint: Its folder.
    """
    manifest = _json_of(checkpoint / MANIFEST_FILE)
    return manifest if isinstance(manifest, dict) and TRAINER_STATE in manifest else None


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def begin_checkpoint(checkpoint: Path) -> frozenset[Path]:
    """Make the folder of a checkpoint, without what a run has written there before, and mark it as one that is being written.

    Args:
        checkpoint: The folder, in the output of the run.

    Returns:
        The files there that are a person's.

    Raises:
        OSError: If the folder cannot be made or written.
    """
    if checkpoint.exists():
        remove_written(checkpoint.parent, checkpoint)
        for name in (MANIFEST_FILE, TRAINER_STATE):  # if they are links, which no run makes
            (checkpoint / name).unlink(missing_ok=True)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / BEGUN_CHECKPOINT).touch()
    return frozenset(
        path
        for path in checkpoint.rglob("*")
        if not path.is_dir() and not is_of_checkpoint(path.relative_to(checkpoint))
    )


def linked_entries(checkpoint: Path, earlier: Iterable[Path]) -> Manifest:
    """Return the entries, by name, of the files of a checkpoint that are links of files of earlier ones, whose manifests have them.

    What an earlier manifest says of a file was true when it was written, so that damage since then is found when the file is read.

    Args:
        checkpoint: The folder of a checkpoint that has no manifest yet.
        earlier: The folders of whole checkpoints.
    """
    entries: Manifest = {}
    for folder in earlier:
        for name, entry in (manifest_of(folder) or {}).items():
            with contextlib.suppress(OSError):
                if (folder / name).stat().st_nlink > 1 and (folder / name).samefile(checkpoint / name):
                    entries[name] = entry
    return entries


def finish_checkpoint(
    checkpoint: Path, beside: Collection[Path], linked: Mapping[str, FileEntry] | None = None
) -> None:
    """Force all files of a checkpoint to the disk, and then write the manifest with which it is whole.

    Args:
        checkpoint: The folder, into which all processes have written their parts.
        beside: The files there that are a person's, from `begin_checkpoint`.
        linked: Entries, by name, of files whose contents are known since they are those of another checkpoint. Default: none.

    Raises:
        OSError: If something cannot be written, or a file is not on the disk as it was written.
    """
    marks = {checkpoint / name for name in (MANIFEST_FILE, BEGUN_CHECKPOINT)}
    inside = sorted(checkpoint.rglob("*"))
    files = [path for path in inside if path.is_file() and path not in beside and path not in marks]
    read = [path for path in files if path.relative_to(checkpoint).as_posix() not in (linked or {})]
    manifest = {**describe_files(checkpoint, read), **(linked or {})}
    for path in files:
        sync(path)
    for folder in (*(path for path in inside if path.is_dir()), checkpoint, checkpoint.parent):
        sync(folder)
    with whole_file(checkpoint / MANIFEST_FILE) as partial:
        partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    (checkpoint / BEGUN_CHECKPOINT).unlink(missing_ok=True)
    misfit = first_misfit(checkpoint, manifest_of(checkpoint) or {})
    if misfit is not None or manifest_of(checkpoint) != manifest:
        raise OSError(errno.EIO, misfit or f"{MANIFEST_FILE} does not have the contents that were written")


def remove_old_checkpoints(output: str | os.PathLike, step: int, keep: int | None, best: int | None = None) -> None:
    """Remove checkpoints until `keep` are left: first those that are not whole or lie beyond `step`, then the oldest.

    What a person has put into one stays.

    Args:
        output: The folder of the run.
        step: Where the run is. A checkpoint beyond it is from before the run was resumed at an earlier one.
        keep: How many to keep; None for all.
        best: The step of one to keep beside these. Default: none.
    """
    if keep is None:
        return
    found = {number: path for number, path in checkpoints(output).items() if number != best}
    order = sorted(found, key=lambda number: (number <= step and is_complete(found[number]), number))
    for number in order[: max(len(order) - keep, 0)]:
        remove_written(output, found[number])
