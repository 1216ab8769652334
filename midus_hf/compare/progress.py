"""Progress of a comparison on standard error: on a terminal a bar of its runs, and everywhere a line per run that ends."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class ShownProgress:
    """Progress on standard error; runs that were done before are counted without a line."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._began: dict[str, float] = {}
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("runs"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=0)
        self._total = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def planned(self, runs: int) -> None:
        """Add to the number of runs that are to be done."""
        self._total += runs
        self._bar.update(self._task, total=self._total)

    def began(self, name: str) -> None:
        """Show that work on a run began."""
        self._began[name] = time.monotonic()
        self._show()

    def ended(self, name: str, failure: str | None) -> None:
        """Show that a run is done or, if `failure` says why, that it failed."""
        began = self._began.pop(name, None)
        self._bar.advance(self._task)
        self._show()
        if began is not None:
            state = "done" if failure is None else f"failed: {failure}"
            self._console.print(
                f"{name}: {state} ({time.monotonic() - began:.0f} s)", markup=False, highlight=False, soft_wrap=True
            )

    def _show(self) -> None:
        self._bar.update(self._task, description=", ".join(self._began))
