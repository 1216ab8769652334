"""Locks on files and folders, which go with the process that holds them, however it ends."""

import contextlib
import errno
import fcntl
import os
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""What file systems say that have no locks, such as some of networks."""

_HELD: "weakref.WeakSet[Lock]" = weakref.WeakSet()
"""All locks of this process."""

_OUTPUTS_HELD: "weakref.WeakSet[Lock]" = weakref.WeakSet()
"""Of the outputs that runs of this process hold."""

_TRIES, _SECONDS_BETWEEN = 20, 0.05


class Lock:
    """A lock on a file or folder that is there, until it is released, forgotten, or the process ends.

    Processes that are forked do not have it: one that outlives its parent would keep what nobody writes locked.

    Args:
        path: Of the file or folder, which is not changed.
        shared: Whether others may share it. Default: false, nobody else has one.

    Raises:
        BlockingIOError: If somebody else holds it, in this process or in another one.
        OSError: If there is nothing at the path, or its file system has no locks.
    """

    def __init__(self, path: str | os.PathLike, shared: bool = False):
        self._descriptor = os.open(path, os.O_RDONLY)
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise
        _HELD.add(self)

    def is_on(self, path: Path) -> bool:
        """Whether it is on what lies at a path now: folders move, and their locks with them."""
        try:
            return self._closing.alive and os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except OSError:
            return False

    def release(self) -> None:
        """Let others have it; again does nothing."""
        self._closing()


def lock_or_warn(path: Path, output: Path) -> Lock | None:
    """Lock what is written for an output; where the file system has no locks a line on standard error says that nothing guards it.

    Args:
        path: Of the file or folder that is locked.
        output: Which the line names.

    Returns:
        The lock; None where there are none.

    Raises:
        BlockingIOError: If somebody else holds it.
        OSError: If there is nothing at the path, or locking it fails otherwise.
    """
    try:
        return Lock(path)
    except OSError as error:
        if not has_no_locks(error):
            raise
    line = f"output {output} is not guarded: its file system has no locks. Let no other run write it meanwhile."
    print(line, file=sys.stderr)
    return None


def has_no_locks(error: OSError) -> bool:
    """Whether an error of `Lock` says that the file system has no locks, and not that somebody holds one."""
    return error.errno in _NO_LOCKS


@contextlib.contextmanager
def alone(path: Path) -> Iterator[int]:
    """Wait until no other process holds a file or folder, and hold it, together with processes that inherit the descriptor.

    Where the file system has no locks nobody waits.

    Args:
        path: It is there.

    Yields:
        The descriptor. A process that is started with it holds the lock as well until it ends, unlike a child of who holds a `Lock`.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if not has_no_locks(error):
                raise
        yield descriptor
    finally:
        os.close(descriptor)


def _forget_in_child() -> None:
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)


def hold_output(output: Path) -> Lock | None:
    """Hold the output of a run until the lock is released, forgotten, or the process ends; one process of a run does.

    A process trains once at a time: a run that was prepared and not ended in it gives way to its next one.

    Args:
        output: A folder.

    Returns:
        The lock. None where the file system has no locks: there nobody is refused.

    Raises:
        ValueError: If another process holds it.
        OSError: If there is no such folder, or locking it fails.
    """
    mine = _lock_of_this_process(output)
    if mine is not None:
        return mine
    for _ in range(_TRIES):
        try:
            lock = lock_or_warn(output, output)
        except BlockingIOError:
            time.sleep(_SECONDS_BETWEEN)  # who only looks has it for a moment (`check_not_held`)
        else:
            if lock is not None:
                _OUTPUTS_HELD.add(lock)
            return lock
    raise ValueError(_refusal(output))


def check_not_held(output: Path) -> None:
    """See that no other process holds an output; all processes of a run may look, before one of them holds it.

    Args:
        output: A folder; it need not exist.

    Raises:
        ValueError: If one does.
    """
    if _lock_of_this_process(output) is not None:
        return
    try:
        Lock(output, shared=True).release()
    except BlockingIOError:
        raise ValueError(_refusal(output)) from None
    except FileNotFoundError:
        return
    except OSError as error:
        if not has_no_locks(error):
            raise


def _lock_of_this_process(output: Path) -> Lock | None:
    return next((lock for lock in _OUTPUTS_HELD if lock.is_on(output)), None)


def _refusal(output: Path) -> str:
    return f"output {str(output)!r} is being written by another run. Wait for it, or choose another folder."
