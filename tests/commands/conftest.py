"""Commands run as a shell would, in this process."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from commands.installed import run_in_process


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    status: int | str | None
    out: str
    err: str


@pytest.fixture
def as_command(monkeypatch, capsys) -> Callable[..., Callable[..., Done]]:
    """Return a function from the name of a command to a function from words to how it ended."""

    def of(name: str, columns: str = "200") -> Callable[..., Done]:
        def run(*words) -> Done:
            monkeypatch.setenv("COLUMNS", columns)
            capsys.readouterr()
            status = run_in_process(name, [*map(str, words)], monkeypatch)
            return Done(status, *capsys.readouterr())

        return run

    return of
