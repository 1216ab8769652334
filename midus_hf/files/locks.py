"""Locks on files and folders, which end at the latest with the process that holds them."""

import contextlib
import errno
import fcntl
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

# Errors of file systems without locks, such as some network file systems.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

# All locks that this process holds.
_HELD: "weakref.WeakSet[Lock]" = weakref.WeakSet()


class Lock:
    """Lock on an existing file or folder, until it is released, garbage-collected, or the process ends.

    Forked processes do not inherit the lock. Otherwise a child that outlives its parent would keep a file locked that
    nobody writes.

    Args:
        path: Path of the file or folder, which is not changed.

    Raises:
        BlockingIOError: If this process or another one holds the lock.
        OSError: If there is nothing at the path, or its file system has no locks.
    """

    def __init__(self, path: str | os.PathLike):
        self._descriptor = os.open(path, os.O_RDONLY)
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise
        _HELD.add(self)

    def is_on(self, path: Path) -> bool:
        """Return whether the lock holds what is at a path now. If a locked folder is moved, its lock moves along."""
        try:
            return self._closing.alive and os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock, unless it was released before."""
        self._closing()


@contextlib.contextmanager
def alone_in(folder: Path, refusal: str) -> Iterator[None]:
    """Create a folder if there is none, and lock it while the context lasts.

    Args:
        folder: Folder of an output, for messages too.
        refusal: Message of the error if somebody else holds the lock.

    Raises:
        ValueError: If somebody else holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_or_warn(folder)
    except BlockingIOError:
        raise ValueError(refusal) from None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def lock_or_warn(output: Path) -> Lock | None:
    """Lock a folder, and return the lock; or warn that the file system has no locks, and return None.

    Raises:
        BlockingIOError: If somebody else holds the lock.
        OSError: If there is nothing at the path, or locking fails for another reason.
    """
    try:
        return Lock(output)
    except OSError as error:
        if not has_no_locks(error):
            raise
    warn_of_no_locks(output)
    return None


def warn_of_no_locks(output: Path) -> None:
    """Say on standard error that nothing guards an output, since its file system has no locks."""
    line = f"output {output} is not guarded: its file system has no locks. Let no other run write it meanwhile."
    print(line, file=sys.stderr)


def has_no_locks(error: OSError) -> bool:
    """Return whether an error of `Lock` means that the file system has no locks, not that somebody holds one."""
    return error.errno in _NO_LOCKS


def _forget_in_child() -> None:
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
