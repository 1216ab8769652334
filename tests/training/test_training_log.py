"""The log has a line an event, survives a cut, and is continued from the step a run resumes at."""

import json

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from midus_hf.training import train
from midus_hf.training.run.training_log import TrainingLog, read_log


def log_step(log: TrainingLog, step: int) -> None:
    state = TrainerState(global_step=step, is_world_process_zero=True)
    state.log_history.append({"step": step, "loss": 1.0 / step})
    log.on_log(None, state, TrainerControl())


def test_a_resumed_run_replaces_the_events_after_its_checkpoint(tmp_path):
    log = TrainingLog(tmp_path / "log.jsonl")
    for step in (1, 2, 3, 4):
        log_step(log, step)
    log.on_train_begin(None, TrainerState(global_step=2, is_world_process_zero=True), TrainerControl())
    log_step(log, 3)
    assert [event["step"] for event in read_log(tmp_path / "log.jsonl")] == [1, 2, 3]


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    assert read_log(path) == [{"step": 1}]
    assert read_log(tmp_path / "absent") == []


def test_events_also_fall_on_the_steps_that_save(tmp_path):
    control = TrainerControl(should_save=True)
    TrainingLog(tmp_path / "log.jsonl").on_step_end(None, TrainerState(), control)
    assert control.should_log


@pytest.mark.parametrize(("step", "falls"), [(5, False), (6, True)])
def test_an_event_falls_on_the_last_step(step, falls, tmp_path):
    control = TrainerControl()
    TrainingLog(tmp_path / "log.jsonl").on_step_end(None, TrainerState(global_step=step, max_steps=6), control)
    assert control.should_log == falls


def test_a_run_of_fewer_steps_than_lie_between_events_tells_its_loss(config_for, tmp_path):
    result = train(config_for(max_steps=3, logging_steps=10))
    assert [event["step"] for event in read_log(tmp_path / "out" / "log.jsonl") if "loss" in event] == [3]
    assert result.loss is not None


def test_only_the_first_process_writes(tmp_path):
    log = TrainingLog(tmp_path / "log.jsonl")
    state = TrainerState(global_step=1, is_world_process_zero=False)
    state.log_history.append({"step": 1})
    log.on_train_begin(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), state, TrainerControl())
    log.on_log(None, state, TrainerControl())
    assert not (tmp_path / "log.jsonl").exists()
