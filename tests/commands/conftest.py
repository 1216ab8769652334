"""Commands run as a shell would, in this process."""

from collections.abc import Callable

import pytest
from commands.installed import Outcome, run_in_process


@pytest.fixture
def as_command(monkeypatch, capsys) -> Callable[..., Callable[..., Outcome]]:
    """Return a function from the name of a command to a function from words to how it ended."""

    def of(name: str, columns: str = "200") -> Callable[..., Outcome]:
        def run(*words) -> Outcome:
            monkeypatch.setenv("COLUMNS", columns)
            capsys.readouterr()
            status = run_in_process(name, [*map(str, words)], monkeypatch)
            return Outcome(status, *capsys.readouterr())

        return run

    return of
