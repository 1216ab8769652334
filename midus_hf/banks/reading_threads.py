"""Threads that read blocks: several, since a disk answers several requests at a time."""

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_MOST_THREADS = 8


class ReadingThreads:
    """Threads that start with the first work and end with `close`, with this object, or with the interpreter.

    A forked process starts its own threads. Work that its parent had submitted never finishes in the forked process.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self._end: Any = None

    @property
    def process(self) -> int:
        """Id of the process that the threads belong to; 0 if there were never any threads."""
        return self._process

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        """Let a thread call `work`.

        `work` must refer neither to this object nor to its owner, since neither could then be garbage-collected.
        """
        if self._pool is None or self._process != os.getpid():
            if self._end is not None:
                self._end.detach()
            self._pool, self._process = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="bank"), os.getpid()
            self._end = weakref.finalize(self, _end, self._pool, self._process)
        return self._pool.submit(work, *arguments)

    def abandon(self) -> None:
        """End the threads without waiting for work that they have begun."""
        if self._end is not None:
            self._end()

    def close(self) -> None:
        """End the threads: finish work that was begun, and drop the rest."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._end.detach()
        self._pool = None


def _end(pool: ThreadPoolExecutor, process: int) -> None:
    """End threads without waiting for their work, if they belong to this process."""
    if process == os.getpid():
        pool.shutdown(wait=False, cancel_futures=True)
