"""Help of commands over midus_hf comes at once: nothing that takes seconds is imported before a command line is read."""

import dataclasses
import subprocess
import sys

import pytest

from midus_hf.training.options import CorpusOptions, TrainConfig, WeightedCorpus

HEAVY = ("torch", "transformers", "midus_hf")


def help_of(command: str) -> str:
    """What `--help` prints, in a process that must not import anything heavy for it."""
    code = (
        f"import sys\nfrom midus_commands.{command} import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stopped:\n    assert not stopped.code, stopped.code\n"
        f"assert not set({HEAVY!r}) & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["evaluate", "train", "usage"])
def test_help_imports_nothing_heavy(command):
    assert "usage" in help_of(command).lower()


def test_help_of_training_names_every_key_with_what_the_docstring_says():
    words = help_of("train").split()
    for options in (TrainConfig, CorpusOptions, WeightedCorpus):
        missing = {f"{field.name}:" for field in dataclasses.fields(options)} - set(words)
        assert not missing, options
    text = " ".join(words)
    assert "learning_rate: Maximum rate of everything but keys and values. Default: 1e-4." in text
    assert "path: A text file, a folder of them, or the id of a dataset on the Hub." in text
    assert "Raises:" not in text
