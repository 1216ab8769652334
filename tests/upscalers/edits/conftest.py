"""Fixtures of tests that edit checkpoints."""

from functools import partial
from pathlib import Path

import pytest

from midus_hf.cli import edit


@pytest.fixture
def chapters(in_process):
    return partial(in_process, edit.main)


@pytest.fixture
def edited(chapters, tmp_path):
    """Run a command that edits a model, and give the folder that it wrote."""

    def run(verb: str, model: Path, *words: object, output: str = "out") -> Path:
        chapters(verb, model, *words, "--output", tmp_path / output).succeeded()
        return tmp_path / output

    return run


@pytest.fixture
def refusal(chapters, tmp_path):
    """Return what gives the one line with which a command is refused, which writes nothing."""

    def refuse(*words: object) -> str:
        done = chapters(*words, "--output", tmp_path / "refused")
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert not (tmp_path / "refused").exists()
        return done.err

    return refuse
