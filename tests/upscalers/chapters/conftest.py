"""Fixtures of the tests of chapters."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midus_commands import chapters as cli
from tests.upscalers.chapters.made import save_chapters
from tests.upscalers.conftest import Outcome


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint with one bank, which all layers read; nobody may change it."""
    return save_chapters(tmp_path_factory.mktemp("chapters") / "model")


@pytest.fixture
def chapters(monkeypatch, capsys) -> Callable[..., Outcome]:
    """Run the `midus-chapters` command in this process."""

    def run(*arguments: Any) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["midus-chapters", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Outcome(ended.value.code, captured.out, captured.err)

    return run
