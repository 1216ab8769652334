"""The commands that are installed, each run as its entry point runs it."""

import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from midus_hf.cli import entry_points

REPOSITORY = Path(__file__).parents[2]
ENTRY_POINTS: dict[str, str] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
COMMANDS = ("upscale", *(f"midus {name}" for name in entry_points.COMMANDS))


class Outcome(NamedTuple):
    """How a command or a script ended, and what it printed."""

    status: int | str | None
    out: str
    err: str

    def succeeded(self) -> "Outcome":
        """Return it; where the status is not 0, fail with what was printed."""
        assert self.status == 0, self.err
        return self

    def json(self) -> Any:
        return json.loads(self.out)


def main_of(command: str) -> Callable[..., Any]:
    """Return the function that is called for the first word of the command."""
    module, _, function = ENTRY_POINTS[command.split()[0]].partition(":")
    return getattr(importlib.import_module(module), function)


def run_in_process(command: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Exit status of a process that the command would run in; one that ends with a traceback has 1."""
    monkeypatch.setattr(sys, "argv", [*command.split(), *words])
    try:
        return main_of(command)() or 0
    except SystemExit as stopped:
        return stopped.code or 0
    except Exception:
        return 1


def run_alone(command: str, words: list[str], afterwards: str = "", folder: Path | None = None) -> Any:
    """Run the command in a process of its own, in a folder, and then some Python."""
    program, *names = command.split()
    module, _, function = ENTRY_POINTS[program].partition(":")
    code = (
        f"import sys\nfrom {module} import {function}\nsys.argv[0] = {program!r}\n"
        f"try:\n    status = {function}()\nexcept SystemExit as stopped:\n    status = stopped.code\n"
        f"{afterwards}\nsys.exit(status)"
    )
    line = [sys.executable, "-c", code, *names, *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=60)
