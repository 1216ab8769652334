"""Help of commands comes at once: nothing that takes seconds is imported before a command line is read."""

import dataclasses
import subprocess
import sys

import pytest
from commands.command_lines import COMMANDS, REPOSITORY, run_alone

from midus_hf.training.options import CorpusOptions, TrainConfig, WeightedCorpus

HEAVY = ("torch", "transformers", "midus_hf.models")


def help_of(command: str) -> str:
    """What `--help` prints, in a process that must not import anything heavy for it."""
    done = run_alone(command, ["--help"], afterwards=f"assert not set({HEAVY!r}) & set(sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy_and_says_the_commands_name(command):
    assert help_of(command).split()[:2] == ["Usage:", command]


@pytest.mark.parametrize("script", ["train_cpt.py", "memory_usage.py"])
def test_help_of_a_script_says_its_own_name(script):
    words = [sys.executable, REPOSITORY / "scripts" / script, "--help"]
    assert subprocess.check_output(words, text=True).split()[:2] == ["Usage:", script]


def test_help_of_training_names_every_key_with_what_the_docstring_says():
    words = help_of("midus-train").split()
    for options in (TrainConfig, CorpusOptions, WeightedCorpus):
        missing = {f"{field.name}:" for field in dataclasses.fields(options)} - set(words)
        assert not missing, options
    text = " ".join(words)
    assert "learning_rate: Maximum rate of everything that has no rate of its own. Default: 1e-4." in text
    assert "path: A text file, a folder of them, or the id of a dataset on the Hub." in text
    assert "Raises:" not in text
