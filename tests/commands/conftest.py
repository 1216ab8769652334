"""Commands run as a shell would, in this process."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest


@pytest.fixture
def as_command(monkeypatch, capsys) -> Callable[[Callable[[], None], str], Callable[..., SimpleNamespace]]:
    """From a main function and its command's name: a function from words to `status`, `out` and `err`."""

    def of(main: Callable[[], None], name: str) -> Callable[..., SimpleNamespace]:
        def run(*words) -> SimpleNamespace:
            monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
            monkeypatch.setenv("COLUMNS", "200")
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main()
            return SimpleNamespace(status=ended.value.code, **capsys.readouterr()._asdict())

        return run

    return of
