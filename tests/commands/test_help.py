"""Help of commands comes at once: nothing that takes seconds is imported before a command line is read."""

import os
import subprocess
import sys

import pytest
from commands.installed import COMMANDS, run_alone, run_in_process

from midus_hf.cli import entry_points
from midus_hf.version import __version__

SUBCOMMANDS = (
    *(f"upscale {name}" for name in ("methods", "inspect", "strip", "adapter", "shuffle")),
    *(f"midus bank {name}" for name in ("list", "merge", "audit")),
    *(f"midus cluster {name}" for name in ("build", "assign", "report")),
)
HEAVY = ("torch", "transformers", "midus_hf.models")


def help_of(command: str) -> str:
    """What `--help` prints, in a process that must not import anything heavy for it."""
    done = run_alone(command, ["--help"], afterwards=f"assert not set({HEAVY!r}) & set(sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy_and_says_the_commands_name(command):
    assert help_of(command).startswith(f"Usage: {command} ")


def test_the_package_is_the_command_for_launchers():
    words = [sys.executable, "-m", "midus_hf", "train", "--help"]
    assert subprocess.check_output(words, text=True).startswith("Usage: midus train ")


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_each_help_fits_one_screen(command, monkeypatch, capsys):
    """Hold each help to 50 lines of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run_in_process(command, ["--help"], monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", ["", *entry_points.COMMANDS, "bank list"])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_each_way_to_ask_for_help_is_answered(command, option, monkeypatch, capsys):
    assert run_in_process(f"midus {command}".strip(), [option], monkeypatch) == 0
    assert capsys.readouterr().out.startswith(f"Usage: midus {command}".strip())


@pytest.mark.parametrize(
    "command",
    ["upscale", "midus", "midus train", "midus look", "midus edit"],
)
def test_without_words_a_command_that_needs_some_shows_its_help(command, monkeypatch, capsys):
    assert run_in_process(command, [], monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: {command} ") and err == ""


@pytest.mark.parametrize("command", ["upscale", "upscale strip", "midus", "midus train", "midus look usage"])
def test_every_command_tells_the_version(command, monkeypatch, capsys):
    assert run_in_process(command, ["--version"], monkeypatch) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("midus trian", "midus: No such command 'trian'. Did you mean 'train'? See 'midus --help'."),
        (
            "midus look usge model",
            "midus look: Invalid value for 'QUESTION': No such question 'usge'. Did you mean 'usage'? See 'midus look --help'.",
        ),
        (
            "midus flops model --bach 2",
            "midus flops: No such option: --bach (Possible options: --batch) See 'midus flops --help'.",
        ),
        ("upscale strp", "upscale: No such command 'strp'. Did you mean 'strip'? See 'upscale --help'."),
    ],
)
def test_a_typo_is_answered_with_what_is_nearest(words, line, monkeypatch, capsys):
    program, *rest = words.split()
    assert run_in_process(program, rest, monkeypatch) == 2
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("midus ", "train"),
        ("midus lo", "look"),
        ("midus look us", "usage"),
        ("midus flops --ba", "--batch"),
        ("upscale ", "strip"),
        ("upscale --me", "--method"),
        ("upscale strip --ou", "--output"),
    ],
)
def test_shells_complete_commands_and_options(words, completed):
    program = words.split()[0]
    request = {
        f"_{program.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    code = f"import sys\nfrom midus_hf.cli.entry_points import {program}\nsys.exit({program}())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **request}, capture_output=True, text=True)
    assert completed in done.stdout.splitlines(), done  # the help would name the word within a line
