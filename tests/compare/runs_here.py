"""Runs of a comparison in this process, in place of a process per run."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compare.small_comparison import InProcess


class RunHere:
    """A run of a comparison that is done when it has begun: what `Running` uses of `subprocess.Popen`."""

    def __init__(self, line: list[str], **options: Any):
        from midus_hf.compare import run_process

        assert line[1:3] == ["-m", "midus_hf.compare.run_process"]
        run_process.main(Path(line[3]))
        self.returncode = 0

    def poll(self) -> int:
        return self.returncode


class CommandsHere(InProcess):
    """What a run uses of `Commands`."""

    def __init__(self, logs: Path, held: int | None):
        super().__init__()

    def hear_signals(self) -> None:
        """Leave the signals to pytest."""


def compare_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `midus compare` make its runs in this process, one behind the other, until the test ends."""
    processes = SimpleNamespace(Popen=RunHere, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr("midus_hf.compare.running.subprocess", processes)
    monkeypatch.setattr("midus_hf.compare.run_process.Commands", CommandsHere)
    monkeypatch.setattr("midus_hf.compare.run_process.ask_for_termination", lambda parent: None)
