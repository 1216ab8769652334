"""What all tests of evaluation share."""

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def no_description_of_the_machine(monkeypatch):
    """The harness describes the machine beside every result, which nothing here reads: a dozen processes, 1 s each time."""
    if importlib.util.find_spec("lm_eval") is not None:
        monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        monkeypatch.setattr("lm_eval.evaluator.get_git_commit_hash", lambda: None)
