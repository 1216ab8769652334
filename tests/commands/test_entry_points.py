"""A command that is interrupted before it reads its words ends in one line, as later."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from commands.installed import COMMANDS, ENTRY_POINTS, REPOSITORY

from midus_hf.cli import command_line, entry_points

INTERRUPTED_WHILE_IMPORTING = """
import signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, getattr(signal, sys.argv.pop(1)))
sys.meta_path.insert(0, Interrupting())
from midus_hf.cli import entry_points
name = sys.argv.pop(1).split()
sys.argv[0], sys.argv[1:1] = name[0], name[1:]
sys.exit(getattr(entry_points, name[0])())
"""


def started(command: str, handler: str = "default_int_handler") -> subprocess.CompletedProcess:
    """The command, interrupted among its imports, in a process whose SIGINT has this handler."""
    words = [handler, command, "--no-such-option"]
    return subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_IMPORTING, *words], cwd=REPOSITORY, capture_output=True, text=True
    )


def test_both_programs_begin_here():
    assert ENTRY_POINTS == {name: f"midus_hf.cli.entry_points:{name}" for name in ("upscale", "midus")}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interruption_among_imports_is_130_and_one_line(command):
    done = started(command)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{command}: interrupted\n")


def test_what_the_shell_has_ignored_stays_ignored():
    done = started("midus flops", "SIG_IGN")
    assert done.returncode == 2 and "No such option" in done.stderr


def test_while_a_command_works_an_interruption_is_its_own(keyboard, monkeypatch, capsys):
    seen = []

    def main(words) -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    monkeypatch.setattr(entry_points.importlib, "import_module", lambda name: SimpleNamespace(main=main))
    monkeypatch.setattr(sys, "argv", ["midus", "eval"])
    assert entry_points.midus() == command_line.INTERRUPTED
    assert seen == [signal.default_int_handler]
    assert capsys.readouterr().err == "midus eval: interrupted\n"


def test_a_command_that_cannot_be_imported_leaves_interruptions_as_they_were(keyboard):
    with pytest.raises(ModuleNotFoundError, match="absent"):
        entry_points.start("upscale", "absent", [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
