"""Progress of an upscaling, as its engine tells it."""

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Progress(Protocol):
    """Whoever shows progress."""

    def start(self, num_bytes: int, num_shards: int) -> None:
        """Writing begins."""

    def advance(self, num_bytes: int) -> None:
        """So many more bytes were written."""

    def stage(self, name: str) -> None:
        """Another stage begins."""

    def begin(self, task: str, num_steps: int) -> None:
        """A task of so many steps begins, beside whatever else goes on."""

    def step(self, task: str, num_steps: int = 1) -> None:
        """So many more steps of a task are done."""

    def end(self, task: str) -> None:
        """A task is done."""

    def warn(self, message: str) -> None:
        """Something that a person should know."""

    def note(self, message: str) -> None:
        """Something that a person will want to see."""

    def finish(self) -> None:
        """All is done."""


@contextlib.contextmanager
def shown(progress: Progress, num_bytes: int, num_shards: int) -> Iterator[None]:
    """Show progress for as long as the work takes, however it ends."""
    progress.start(num_bytes, num_shards)
    try:
        yield
    finally:
        progress.finish()


class NoProgress:
    """Shows nothing."""

    def start(self, num_bytes: int, num_shards: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def stage(self, name: str) -> None: ...

    def begin(self, task: str, num_steps: int) -> None: ...

    def step(self, task: str, num_steps: int = 1) -> None: ...

    def end(self, task: str) -> None: ...

    def warn(self, message: str) -> None: ...

    def note(self, message: str) -> None: ...

    def finish(self) -> None: ...
