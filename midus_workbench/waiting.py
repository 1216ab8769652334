"""Processes that work on the same thing wait for one another."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(path: Path) -> Iterator[int]:
    """Wait until no other process holds a file or folder, and hold it.

    Args:
        path: It is there.

    Yields:
        A descriptor: a process that inherits it holds the lock as well, until it ends.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
