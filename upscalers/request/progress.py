"""Progress of an upscaling."""

import contextlib
from collections.abc import Iterator


class Progress:
    """Progress that shows nothing; a subclass shows stages that follow each other, and tasks that run beside the stages."""

    def start(self) -> None:
        """Start showing progress, when the work begins."""

    def stage(self, name: str, num_steps: int, unit: str = "steps") -> None:
        """Begin the next stage, which has `num_steps` steps; `unit` may be `"bytes"`."""

    def advance(self, num_steps: int = 1) -> None:
        """Count `num_steps` more steps of the stage as done."""

    def begin(self, task: str, num_steps: int) -> None:
        """Begin a task of `num_steps` steps that runs beside the stage and other tasks."""

    def step(self, task: str, num_steps: int = 1) -> None:
        """Count `num_steps` more steps of a task as done."""

    def end(self, task: str) -> None:
        """End a task."""

    def warn(self, message: str) -> None:
        """Show a warning."""

    def note(self, message: str) -> None:
        """Show a message that a person will want to see."""

    def finish(self) -> None:
        """Stop showing progress, when all work is done or has failed."""


@contextlib.contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """Show progress inside the block, and stop showing progress when the block ends or raises."""
    progress.start()
    try:
        yield
    finally:
        progress.finish()


def begin_writing(progress: Progress, num_bytes: int, num_shards: int) -> None:
    """Begin the stage in which tensors are written."""
    progress.stage(f"writing {num_shards} shard{'s' * (num_shards > 1)}", num_bytes, "bytes")
