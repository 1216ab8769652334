"""Files that appear complete or not at all, even if a process is killed or the power fails."""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from midus_hf.files.locks import Lock, has_no_locks

_UNIQUE = re.compile("[0-9a-f]{8}")


def unfinished_name(name: str, unique: str, state: str = "partial") -> str:
    """Return the name of a file or folder while it is being written, in a form that only this package uses.

    Args:
        unique: String that tells this attempt from others; 8 random hexadecimal digits.
        state: `"partial"`, or `"replaced"` for what stood at the path and is complete. Default: `"partial"`.
    """
    return f".{name}.midus-{unique}.{state}"


def new_unfinished_path(path: Path, state: str = "partial") -> Path:
    """Return a new path beside `path`, at which to write what is then moved to `path`, or to keep what stood there."""
    return path.with_name(unfinished_name(path.name, secrets.token_hex(4), state))


def unfinished_paths(path: Path, state: str = "partial") -> list[Path]:
    """Return the unfinished files and folders beside a path, left by killed processes or in use by running ones."""
    prefix, _, suffix = unfinished_name(path.name, "*", state).rpartition("*")
    beside = (
        entry for entry in path.parent.iterdir() if entry.name.startswith(prefix) and entry.name.endswith(suffix)
    )
    return [entry for entry in beside if _UNIQUE.fullmatch(entry.name[len(prefix) : -len(suffix)])]


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name, and move it to its path when it is complete and on the disk.

    A process holds a lock on its temporary file. A file left by a killed process is removed when the same file is written
    again. On a file system without locks it stays, since nobody can tell whether its process is still running.

    Yields:
        Path of an empty file in the same folder, to write to, named by `unfinished_name`. The file is removed after an error.
    """
    _remove_abandoned(path)
    partial, lock = begin_unfinished(path, lambda partial: partial.touch(exist_ok=False))
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)
        if lock is not None:
            lock.release()


def _remove_abandoned(path: Path) -> None:
    for partial in unfinished_paths(path):
        if partial.is_symlink() or not partial.is_file():
            continue
        with contextlib.suppress(OSError):  # another process is writing the file, or has just removed it
            lock = Lock(partial)
            partial.unlink()
            lock.release()


def begin_unfinished(path: Path, make: Callable[[Path], object]) -> tuple[Path, Lock | None]:
    """Make a new file or folder that is to be moved to a path, and lock it. Without locks in the file system, the lock is None.

    Args:
        path: The path, in an existing folder.
        make: Function that makes an empty file or folder at a path, and raises `FileExistsError` if something is there.
    """
    while True:
        partial = new_unfinished_path(path)
        make(partial)
        try:
            lock = Lock(partial)
        except (BlockingIOError, FileNotFoundError):
            continue  # before the lock was taken, another process took the file for an abandoned one
        except OSError as error:
            if has_no_locks(error):
                return partial, None
            partial.rmdir() if partial.is_dir() else partial.unlink(missing_ok=True)
            raise
        if lock.is_on(partial):
            return partial, lock
        lock.release()


def move_into_place(source: Path, target: Path, last: str) -> None:
    """Move everything in a folder into another folder, the file that marks the rest as complete last.

    All other files are on the disk by then. Folders of the same names are replaced.

    Args:
        source: The complete folder, on the same file system as `target`; removed afterwards.
        target: The other folder. Files of the same names are replaced.
        last: Name of the file that marks the others as complete. In `target` it is removed before anything else changes.
    """
    for path in source.rglob("*"):
        if not path.is_symlink():
            sync(path)
    (target / last).unlink(missing_ok=True)
    sync(target)
    for path in sorted(source.iterdir(), key=lambda path: (path.name == last, path.name)):
        if path.name == last:
            sync(target)
        destination = target / path.name
        if _is_folder(destination):
            shutil.rmtree(destination)
        os.replace(path, destination)
    sync(target)
    source.rmdir()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
