"""Threads that read blocks: as many as a disk has answers at a time, and none longer than whoever asked for them."""

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_MOST_THREADS = 8


class ReadingThreads:
    """Threads that begin with the first work, and end with `close`, with this object, or with the interpreter.

    A process that was forked has none of its parent's threads, and begins its own; what its parent had submitted never ends there.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self._end: Any = None

    @property
    def process(self) -> int:
        """That the threads are of; 0 if there never was one."""
        return self._process

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        """Let a thread do some work, which must hold neither this object nor who holds it: they would never be collected."""
        if self._pool is None or self._process != os.getpid():
            if self._end is not None:
                self._end.detach()
            self._pool, self._process = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="bank"), os.getpid()
            self._end = weakref.finalize(self, _end, self._pool, self._process)
        return self._pool.submit(work, *arguments)

    def abandon(self) -> None:
        """End the threads without waiting for the work that they have begun."""
        if self._end is not None:
            self._end()

    def close(self) -> None:
        """End the threads: work that was begun is finished, the rest is dropped."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._end.detach()
        self._pool = None


def _end(pool: ThreadPoolExecutor, process: int) -> None:
    """Let threads end without waiting for them, in the process that has them."""
    if process == os.getpid():
        pool.shutdown(wait=False, cancel_futures=True)
