"""What was measured of a model is measured again when anything that it depends on has changed, and not before."""

import json
import os
from types import SimpleNamespace

import pytest
from compare.made_results import comparison
from compare.small_comparison import HEADWISE, Measured, write_room

from midus_hf.compare.commands import StepFailed
from midus_hf.compare.measuring import Evaluations


class Counting:
    """Tells how often it was asked, as `midus eval` would tell a perplexity."""

    def __init__(self):
        self.lines = []

    def run(self, step, command, *words):
        assert command == "midus eval"
        self.lines.append(words)
        return SimpleNamespace(output=json.dumps({"models": [{"asked": len(self.lines)}]}))


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("1")
    (tmp_path / "text").write_text("words")
    return tmp_path / "model"


@pytest.fixture
def asked(model, tmp_path):
    """Asks in a new process, so to speak, and gives what is told."""
    commands = Counting()

    def ask(*words, step="plants", **changes):
        (tmp_path / "run").mkdir(exist_ok=True)
        evaluations = Evaluations(tmp_path / "run", comparison(["a"], **changes), commands)
        return evaluations.measure(step, model, "--text", tmp_path / "text", *words)["asked"]

    return ask


def touch(path):
    path.write_text("2")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("changed", ["weights", "text", "another file", "words", "step", "trust"])
def test_an_evaluation_is_kept_until_what_it_depends_on_changes(changed, asked, model, tmp_path):
    assert (asked(), asked(), asked("-" * 5000, step="long"), asked("-" * 5000, step="long")) == (1, 1, 2, 2)
    given, changes = (), {}
    if changed == "weights":
        touch(model / "weights")
    elif changed == "text":
        touch(tmp_path / "text")
    elif changed == "another file":
        (model / "bank").mkdir()
        touch(model / "bank" / "level")
    elif changed == "words":
        given = ("--max-tokens", 5)
    elif changed == "step":
        changes = {"step": "stars"}
    else:
        changes = {"trust_remote_code": True}
    assert asked(*given, **changes) == 3 == asked(*given, **changes)


def test_models_of_the_hub_are_measured_every_time(tmp_path):
    evaluations = Evaluations(tmp_path, comparison(["a"]), Counting())
    assert [evaluations.measure("base", "owner/name")["asked"] for _ in range(2)] == [1, 2]


def test_a_model_that_was_trained_again_is_measured_again(tmp_path):
    room = write_room(tmp_path)
    measured = Measured(room, tmp_path / "out", {"a": {"upscale": HEADWISE}})
    measured.measure_base()
    (run,) = measured.runs()
    measured.commands.fails = "shuffled-stars"
    with pytest.raises(StepFailed):
        measured.measure(run)
    measured.place.remove_trained(measured.paths(run).trained)
    measured.commands.fails = None
    measured.measure(run)
    assert measured.commands.steps.count("saved-plants") == 2
