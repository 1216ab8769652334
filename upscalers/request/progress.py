"""Progress of an upscaling, as its engine tells it."""

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Progress(Protocol):
    """Whoever shows progress: one stage after the other, and tasks beside them."""

    def start(self) -> None:
        """The work begins."""

    def stage(self, name: str, num_steps: int, unit: str = "steps") -> None:
        """The next stage begins, of so many steps; `"bytes"` is a unit too."""

    def advance(self, num_steps: int = 1) -> None:
        """So many more steps of the stage are done."""

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
def shown(progress: Progress) -> Iterator[None]:
    """Show progress for as long as the work takes, however it ends."""
    progress.start()
    try:
        yield
    finally:
        progress.finish()


def begin_writing(progress: Progress, num_bytes: int, num_shards: int) -> None:
    """The stage in which tensors are written."""
    progress.stage(f"writing {num_shards} shard{'s' * (num_shards > 1)}", num_bytes, "bytes")


class NoProgress:
    """Shows nothing."""

    def start(self) -> None: ...

    def stage(self, name: str, num_steps: int, unit: str = "steps") -> None: ...

    def advance(self, num_steps: int = 1) -> None: ...

    def begin(self, task: str, num_steps: int) -> None: ...

    def step(self, task: str, num_steps: int = 1) -> None: ...

    def end(self, task: str) -> None: ...

    def warn(self, message: str) -> None: ...

    def note(self, message: str) -> None: ...

    def finish(self) -> None: ...
