"""Commands run as a shell would, in this process."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from commands.installed import run_in_process


@pytest.fixture
def as_command(monkeypatch, capsys) -> Callable[[str], Callable[..., SimpleNamespace]]:
    """Return a function from the name of a command to a function from words to `status`, `out` and `err`."""

    def of(name: str) -> Callable[..., SimpleNamespace]:
        def run(*words) -> SimpleNamespace:
            monkeypatch.setenv("COLUMNS", "200")
            capsys.readouterr()
            status = run_in_process(name, [*map(str, words)], monkeypatch)
            return SimpleNamespace(status=status, **capsys.readouterr()._asdict())

        return run

    return of
