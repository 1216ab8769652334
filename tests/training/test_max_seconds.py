"""A run of so many seconds ends as one of so many steps does, and its resumptions have the rest of them."""

import itertools
import json
import math
import time
from types import SimpleNamespace

import pytest
from processes.warm import run_ranks
from training.outcomes import assert_same_run, by_step, exact_log, moved
from training.steered_runs import interrupted, signal_at
from training.two_processes import SCRIPT
from transformers import TrainerCallback, TrainerState

from midus_hf.training.output.run_checkpoints import finish_checkpoint, last_checkpoint
from midus_hf.training.run import callbacks, run_trainer
from midus_hf.training.run.callbacks import ProgressTable, TrainingClock
from midus_hf.training.run.train import prepare, train


class NoTable(TrainerCallback):
    """Stands for the progress table, which reads the clock as well."""

    def close(self):
        pass


@pytest.fixture
def a_second_a_step(monkeypatch):
    """A second passes whenever the clock is read: in each step, evaluation and checkpoint."""
    seconds = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)), monotonic=time.monotonic)
    monkeypatch.setattr(callbacks, "time", clock)
    monkeypatch.setattr(run_trainer, "ProgressTable", lambda *_: NoTable())


def test_it_ends_as_after_a_last_step_with_the_schedule_of_all_steps(
    a_second_a_step, config_for, corpus, tmp_path, capsys
):
    options = {"max_steps": 12, "eval_text": str(corpus), "eval_steps": 2, "save_steps": 2, "logging_steps": 3}
    train(config_for("whole", **options))
    capsys.readouterr()
    run = prepare(config_for(max_seconds=5, **options))
    result = run.execute()
    assert result.steps == 5, "evaluations and checkpoints do not count"
    assert "Training ends after step 5 of 12: it has taken 5.0 s, and max_seconds is 5.\n" in capsys.readouterr().err
    assert last_checkpoint(tmp_path / "out").name == "checkpoint-5"
    assert (tmp_path / "out" / "config.json").exists()
    assert list(by_step(tmp_path / "out", "eval_loss")) == [0, 2, 4, 5]
    assert by_step(tmp_path / "out", "training_seconds") == {2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}
    assert by_step(tmp_path / "out", "ended_by_max_seconds") == {5: True}
    assert by_step(tmp_path / "whole", "ended_by_max_seconds") == {}
    assert exact_log(tmp_path / "out")[:3] == exact_log(tmp_path / "whole")[:3]
    assert "| 5 | 160 | " in (tmp_path / "out" / "README.md").read_text()


def test_without_checkpoints_none_is_saved_and_the_last_step_ends_by_itself(
    a_second_a_step, config_for, tmp_path, capsys
):
    result = train(config_for(max_seconds=3, max_steps=9))
    assert result.steps == 3 and last_checkpoint(tmp_path / "out") is None
    capsys.readouterr()
    train(config_for("last", max_seconds=3, max_steps=3))
    assert by_step(tmp_path / "last", "ended_by_max_seconds") == {} and "max_seconds" not in capsys.readouterr().err


def test_a_resumed_run_has_the_rest_of_the_seconds(a_second_a_step, config_for, corpus, tmp_path):
    options = {"max_steps": 20, "eval_text": str(corpus), "save_steps": 50}
    train(config_for("whole", max_seconds=6, **options))
    interrupted(prepare(config_for("parts", max_seconds=6, **options)), 4)
    config = config_for("parts", max_seconds=6, resume_from_checkpoint=True, **options)
    assert train(config).steps == 6
    assert_same_run(tmp_path / "parts", tmp_path / "whole")

    again = train(config)
    assert (again.steps, again.tokens_per_second) == (6, None), "it had ended"
    assert moved(tmp_path / "parts", tmp_path / "whole") == set()
    longer = config_for("parts", max_seconds=8, resume_from_checkpoint=True, **options)
    assert train(longer).steps == 8


def test_seconds_of_a_run_without_a_limit_count_when_it_is_resumed_with_one(
    a_second_a_step, config_for, corpus, tmp_path
):
    options = {
        "max_steps": 9,
        "eval_text": str(corpus),
        "save_steps": 3,
        "eval_steps": 2,
        "load_best_model_at_end": True,
    }
    interrupted(prepare(config_for(**options)), 5)
    config = config_for(max_seconds=4, resume_from_checkpoint=True, **options)
    result = train(config)
    assert (result.steps, result.tokens_per_second) == (5, None) and result.best_step is not None
    assert list(by_step(tmp_path / "out", "eval_loss")) == [0, 2, 4, 5], "the model that is saved has been measured"


def test_a_checkpoint_that_does_not_know_its_seconds_begins_to_count_them(a_second_a_step, config_for, tmp_path):
    options = {"max_steps": 9, "save_steps": 2}
    interrupted(prepare(config_for(**options)), 4)
    path = last_checkpoint(tmp_path / "out") / "trainer_state.json"
    state = json.loads(path.read_text())
    assert state["stateful_callbacks"].pop("TrainingClock") == {"args": {}, "attributes": {"seconds": 4.0}}
    path.write_text(json.dumps(state))
    finish_checkpoint(path.parent, ())
    config = config_for(max_seconds=3, resume_from_checkpoint=True, **options)
    assert train(config).steps == 7


def test_a_signal_in_the_step_that_ends_it_changes_nothing(a_second_a_step, config_for, tmp_path):
    run = prepare(config_for(max_seconds=3, max_steps=9))
    run.trainer.add_callback(signal_at(3))
    assert run.execute().steps == 3
    assert (tmp_path / "out" / "config.json").exists() and last_checkpoint(tmp_path / "out") is None


def test_the_time_left_is_at_most_that_of_the_seconds(capsys):
    clock = TrainingClock(100.0, int, measures=False)
    assert TrainingClock(None, int, measures=False).seconds_left == math.inf
    table, state = ProgressTable([], clock), TrainerState(max_steps=1000)
    table.on_train_begin(None, state, None)
    table._started -= 10
    state.global_step, clock.seconds = 1, 40.0
    table.on_log(None, state, SimpleNamespace(should_evaluate=False), logs={"loss": 1.0, "learning_rate": 1.0})
    assert capsys.readouterr().out.split()[-1] == "0:01:00"
    clock.seconds = 140.0
    assert clock.seconds_left == 0


def test_all_processes_end_at_the_same_step(words, tmp_path):
    run = run_ranks(SCRIPT, *words, "max_seconds=0.5", "save_steps=1000000")
    assert run.returncode == 0, run.stderr
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    assert {path.name for path in checkpoint.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    step = int(checkpoint.name.rpartition("-")[2])
    assert run.stderr.count(f"Training ends after step {step:,} of 100,000") == 1 and f"{step:,} steps" in run.stdout
