"""Progress of an upscaling."""

import contextlib
from collections.abc import Iterator


class Progress:
    """Progress that shows nothing; a subclass shows stages that follow each other."""

    def start(self) -> None:
        """Start showing progress, when the work begins."""

    def stage(self, name: str, num_steps: int, unit: str = "steps") -> None:
        """Begin the next stage, which has `num_steps` steps; `unit` may be `"bytes"`."""

    def advance(self, num_steps: int = 1) -> None:
        """Count `num_steps` more steps of the stage as done."""

    def warn(self, message: str) -> None:
        """Show a warning."""

    def note(self, message: str) -> None:
        """Show a message to the user."""

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
