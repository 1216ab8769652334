"""Files that appear whole or not at all, whenever a process ends and whenever the power fails."""

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Of Linux's fallocate: the file stays as long as it is, and bytes become a hole."""


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
        Where to write: the same folder, under the name `.NAME.partial`. After an error nothing is left there.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # half of one, by a process that was killed
    try:
        yield partial
        put_in_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def link_or_copy(source: Path, path: Path) -> None:
    """Give a file that nobody changes in place another name, or copy it where the file system has no links between the two.

    Args:
        source: The file, which is only ever replaced as a whole.
        path: The other name; a file that is there is replaced.
    """
    with whole_file(path) as partial:
        try:
            os.link(source, partial)
        except OSError:
            shutil.copyfile(source, partial)


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
