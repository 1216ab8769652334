"""Files that appear whole or not at all, whenever a process ends and whenever the power fails."""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from midus_hf.files.locks import Lock, has_no_locks

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Of Linux's fallocate: the file stays as long as it is, and bytes become a hole."""
_COPIED_AT_ONCE = 2**24
_UNIQUE = re.compile("[0-9a-f]{8}")
_JOURNAL = "-journal"
"""What SQLite appends to the name of a database for the file by which it takes a change back."""


def unfinished_name(name: str, unique: str) -> str:
    """Return what a file or folder is called while it is written: a name that nobody but this package gives.

    Args:
        name: The name that the file or folder gets when it is complete.
        unique: What tells this attempt from others; 8 random hexadecimal digits.
    """
    return f".{name}.midus-{unique}.partial"


def new_unfinished_path(path: Path) -> Path:
    """Return a path beside another one, of a name under which something may be written that is to be moved there."""
    return path.with_name(unfinished_name(path.name, secrets.token_hex(4)))


def unfinished_paths(path: Path) -> list[Path]:
    """Return the files and folders beside a path that were to be moved there, by processes that were killed or are at work."""
    before, _, after = unfinished_name(path.name, "*").rpartition("*")
    beside = (one for one in path.parent.iterdir() if one.name.startswith(before) and one.name.endswith(after))
    return [one for one in beside if _UNIQUE.fullmatch(one.name[len(before) : -len(after)])]


def sync(path: Path) -> None:
    """Force a file, or the entries of a folder, to the disk.

    Args:
        path: Of the file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write a file beside its place, and move it there when it is complete and on the disk.

    Args:
        path: Of the file, in a folder that exists; one that is there is replaced.

    Yields:
        Where to write: an empty file in the same folder, under a name as `unfinished_name` gives it. After an error nothing is left
        there. What a killed process left is removed by the next one that writes the same file: a process that is still at work
        holds a lock on what it writes. Where the file system has no locks, nobody can tell, and nothing is removed.
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
        with contextlib.suppress(OSError):  # another process holds it, or is faster
            lock = Lock(partial)
            partial.with_name(partial.name + _JOURNAL).unlink(missing_ok=True)
            partial.unlink()
            lock.release()


def _begin(path: Path) -> tuple[Path, Lock | None]:
    """Make an empty file that is to be moved to a path, and lock it; no lock where the file system has none."""
    while True:
        partial = new_unfinished_path(path)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            lock = Lock(partial)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process took it for one that was abandoned, in the moment before it was locked
        except OSError as error:
            if has_no_locks(error):
                return partial, None
            partial.unlink(missing_ok=True)
            raise
        if lock.is_on(partial):
            return partial, lock
        lock.release()


def link_or_copy(source: Path, path: Path) -> None:
    """Give a file that nobody changes in place another name, or copy it where the file system has no links between the two.

    Args:
        source: The file, which is only ever replaced as a whole.
        path: The other name; a file that is there is replaced.
    """
    linked = new_unfinished_path(path)
    try:
        os.link(os.path.realpath(source), linked)  # the hub's cache has symbolic links, which mean nothing elsewhere
    except OSError:
        with whole_file(path) as partial:
            copy_with_holes(source, partial)
        return
    try:
        put_in_place(linked, path)
    finally:
        linked.unlink(missing_ok=True)  # a link that is moved onto a link of the same file stays


def have_own_file(path: Path) -> None:
    """Give a path a copy of its file if that has other names too: what is then written to it in place does not reach these.

    Args:
        path: Of a file that is about to be written in place. Nothing is done if there is no file.

    Raises:
        OSError: If the copy cannot be written.
    """
    if path.is_file() and path.stat().st_nlink > 1:
        with whole_file(path) as partial:
            copy_with_holes(path, partial)


def copy_with_holes(source: Path, path: Path) -> None:
    """Copy the contents of a file; holes stay holes where the system tells them from zeros.

    Args:
        source: The file.
        path: Where to write; a file that is there is overwritten.

    Raises:
        OSError: If one cannot be read, or the other cannot be written.
    """
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
    """Return where the next bytes of a file that are no hole begin and end; both are its size if there are none."""
    if not hasattr(os, "SEEK_DATA"):
        return start, size
    try:
        begin = os.lseek(descriptor, start, os.SEEK_DATA)
        return begin, min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
    except OSError as error:
        return (size, size) if error.errno == errno.ENXIO else (start, size)


def punch_hole(descriptor: int, start: int, count: int) -> None:
    """Give the room of bytes that are zeros back to the disk, where the system and the file system can; nothing else changes.

    Args:
        descriptor: Of a file that is open for writing.
        start: The first byte.
        count: How many.
    """
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None) if sys.platform == "linux" else None
    if fallocate is not None:
        fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(count))


def put_in_place(written: Path, path: Path) -> None:
    """Give a file that is complete its place, which is on the disk afterwards, as the file is before.

    Args:
        written: The file, on the file system of its place.
        path: Its place; a file that is there is replaced.
    """
    sync(written)
    os.replace(written, path)
    sync(path.parent)


def move_into_place(source: Path, target: Path, last: Collection[str], clear: Callable[[Path], object]) -> None:
    """Move all that a folder holds into another one, what vouches for the rest when the rest is there, and on the disk.

    Args:
        source: The folder, complete, on the file system of the other; gone afterwards.
        target: The other folder. Files of the same names are replaced.
        last: Names of files that vouch for those beside them. Those in `target` go before anything else changes there.
        clear: Removes what may be removed of a folder in `target` that is to be replaced. What it leaves stays there.
    """
    for path in source.rglob("*"):
        if not path.is_symlink():
            sync(path)
    _move(source, target, last, clear)


def _move(source: Path, target: Path, last: Collection[str], clear: Callable[[Path], object]) -> None:
    paths = sorted(source.iterdir(), key=lambda path: (path.name in last, path.name))
    for path in paths:
        if path.name in last:
            (target / path.name).unlink(missing_ok=True)
    sync(target)
    for path in paths:
        place = target / path.name
        if path.name in last:
            sync(target)
        if _is_folder(path) and _is_folder(place):
            clear(place)
        if _is_folder(path) and _is_folder(place):
            _move(path, place, last, clear)
        else:
            os.replace(path, place)
    sync(target)
    source.rmdir()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
