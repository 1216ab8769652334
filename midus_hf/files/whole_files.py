"""Files that appear complete or not at all, even if a process is killed or the power fails."""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from midus_hf.files.locks import Lock, has_no_locks

# Flags of Linux's fallocate: keep the size of the file, and turn a range of bytes into a hole.
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_COPIED_AT_ONCE = 2**24
_UNIQUE = re.compile("[0-9a-f]{8}")
# Suffix of the journal that SQLite writes beside a database, to undo an interrupted change.
_JOURNAL = "-journal"


def unfinished_name(name: str, unique: str) -> str:
    """Return the name of a file or folder while it is being written, in a form that only this package uses.

    Args:
        unique: String that tells this attempt from others; 8 random hexadecimal digits.
    """
    return f".{name}.midus-{unique}.partial"


def new_unfinished_path(path: Path) -> Path:
    """Return a new path beside `path`, at which to write what is then moved to `path`."""
    return path.with_name(unfinished_name(path.name, secrets.token_hex(4)))


def unfinished_paths(path: Path) -> list[Path]:
    """Return the unfinished files and folders beside a path, left by killed processes or in use by running ones."""
    prefix, _, suffix = unfinished_name(path.name, "*").rpartition("*")
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
    partial, lock = _begin(path)
    try:
        yield partial
        put_in_place(partial, path)
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
            partial.with_name(partial.name + _JOURNAL).unlink(missing_ok=True)
            partial.unlink()
            lock.release()


def _begin(path: Path) -> tuple[Path, Lock | None]:
    """Create an empty file that is to be moved to a path, and lock it. Without locks in the file system, the lock is None."""
    while True:
        partial = new_unfinished_path(path)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            lock = Lock(partial)
        except (BlockingIOError, FileNotFoundError):
            continue  # before the lock was taken, another process took the file for an abandoned one
        except OSError as error:
            if has_no_locks(error):
                return partial, None
            partial.unlink(missing_ok=True)
            raise
        if lock.is_on(partial):
            return partial, lock
        lock.release()


def link_or_copy(source: Path, path: Path) -> None:
    """Link `path` to a file that is never changed in place, or copy the file if the file system cannot link to `path`."""
    linked = new_unfinished_path(path)
    try:
        os.link(os.path.realpath(source), linked)  # symbolic links of the hub's cache would break elsewhere
    except OSError:
        with whole_file(path) as partial:
            copy_with_holes(source, partial)
        return
    try:
        put_in_place(linked, path)
    finally:
        linked.unlink(missing_ok=True)  # renaming a hard link to another link of the same file leaves both


def have_own_file(path: Path) -> None:
    """Replace a file that has several hard links by a copy, so that writing to it in place does not change the other links."""
    if path.is_file() and path.stat().st_nlink > 1:
        with whole_file(path) as partial:
            copy_with_holes(path, partial)


def copy_with_holes(source: Path, path: Path) -> None:
    """Copy the contents of a file over another file. Holes stay holes if the system can tell them from zeros."""
    with source.open("rb", buffering=0) as read, path.open("wb", buffering=0) as written:
        size = os.fstat(read.fileno()).st_size
        start = end = 0
        while start < size:
            start, end = _next_data(read.fileno(), start, size)
            while start < end and (data := os.pread(read.fileno(), min(end - start, _COPIED_AT_ONCE), start)):
                start += os.pwrite(written.fileno(), data, start)
            if start < end:
                raise OSError(errno.EIO, f"{source} became shorter while it was copied")
        written.truncate(size)


def _next_data(descriptor: int, start: int, size: int) -> tuple[int, int]:
    """Return the start and end of the next bytes of a file that are not a hole; `(size, size)` if there are none."""
    if not hasattr(os, "SEEK_DATA"):
        return start, size
    try:
        begin = os.lseek(descriptor, start, os.SEEK_DATA)
        return begin, min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
    except OSError as error:
        return (size, size) if error.errno == errno.ENXIO else (start, size)


def punch_hole(descriptor: int, start: int, count: int) -> None:
    """Return the disk space of `count` zero bytes of an open file to the file system, if the system and the file system can."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None) if sys.platform == "linux" else None
    if fallocate is not None:
        fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(count))


def put_in_place(written: Path, path: Path) -> None:
    """Move a complete file to its path on the same file system. First the file reaches the disk, and then the move."""
    sync(written)
    os.replace(written, path)
    sync(path.parent)


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
