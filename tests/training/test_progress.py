"""What a run prints and logs: one row an event that fits the terminal, a line an event in the log, and nothing of libraries."""

import json
import re
import sys

import pytest
from training.outcomes import events, logged
from transformers import TrainerControl, TrainerState, TrainingArguments

from midus_hf.training.run.callbacks import (
    ProgressTable,
    TrainingClock,
    TrainingLog,
    read_log,
    short_count,
    short_time,
)
from midus_hf.training.run.train import train

LOGS = {"loss": 12.3456789, "learning_rate": 1.234e-5, "grad_norm": 1234567.8, "usage": 1.0}


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if re.match(r" +[\d,]+  |.* step  ", line)]


def test_a_run_prints_a_row_an_event_and_no_more(config_for, tmp_path, library_bars, capsys):
    config = config_for(max_steps=7, logging_steps=3, save_steps=5)
    capsys.readouterr()
    train(config)
    out, err = capsys.readouterr()
    header, *shown = rows(out)
    assert header == ["step", "tokens", "loss", "rate", "grad", "norm", "tokens/s", "left"]
    log = events(tmp_path / "out")
    assert [row[0] for row in shown] == ["3", "5", "6", "7"] == [str(event["step"]) for event in log]
    for row, event in zip(shown, log, strict=True):
        assert row[1:4] == [str(32 * event["step"]), f"{event['loss']:.4f}", f"{event['learning_rate']:.2e}"]
        assert float(row[4]) == pytest.approx(event["grad_norm"], rel=5e-3)
    assert "{" not in out and "Writing model shards" not in err


def test_the_widest_row_fits_80_columns(capsys):
    table = ProgressTable([""], TrainingClock(None, int, False))
    state = TrainerState(max_steps=999_999, global_step=0, num_input_tokens_seen=0)
    table.on_train_begin(None, state, TrainerControl())
    table._started -= 300 * 86400
    state.global_step, state.num_input_tokens_seen = 999_998, 998_765_432_109
    table._last_time -= 99_999
    table.on_log(None, state, TrainerControl(should_evaluate=True), logs=dict(LOGS))
    assert len(capsys.readouterr().out.splitlines()) == 1, "the row waits for the perplexity"
    table.on_log(None, state, TrainerControl(should_evaluate=True), logs={"perplexity": 12345.67891})
    line = capsys.readouterr().out
    assert line == "999,998    999B  12.3457  1.23e-05   1.23e+06  9,987,754   0:00:26  12345.6789\n"
    assert len(line.rstrip()) <= 80


def test_a_step_is_one_row_with_its_perplexity(config_for, corpus, tmp_path, capsys):
    held_out = {"eval_text": str(corpus), "eval_steps": 2}
    train(config_for(max_steps=3, **held_out))
    header, *shown = rows(capsys.readouterr().out)
    assert header[-1] == "perplexity"
    assert [(row[0], len(row)) for row in shown] == [("0", 2), ("1", 7), ("2", 8), ("3", 8)]
    measured = logged(tmp_path / "out", "perplexity")
    assert [row[-1] for row in shown if row[0] != "1"] == [f"{value:.4f}" for value in measured]


def test_at_a_terminal_rows_stand_above_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    table = ProgressTable([], TrainingClock(None, int, False))
    state = TrainerState(max_steps=100, global_step=40)
    table.on_train_begin(None, state, TrainerControl())
    state.global_step = 50
    table.on_step_end(None, state, TrainerControl())
    table.on_log(None, state, TrainerControl(), logs=dict(LOGS))
    table.close()
    out, err = capsys.readouterr()
    assert [row[0] for row in rows(out)] == ["step", "50"]
    assert " 40 %|" in err and "40/100" in err


def test_only_the_first_process_prints(capsys):
    table = ProgressTable([], TrainingClock(None, int, False))
    state = TrainerState(max_steps=100, is_world_process_zero=False)
    table.on_train_begin(None, state, TrainerControl())
    table.on_log(None, state, TrainerControl(), logs=dict(LOGS))
    table.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00K"),
        (9994, "9.99K"),
        (99_960, "100K"),
        (999_600, "1.00M"),
        (1.64e9, "1.64B"),
    ],
)
def test_counts_are_short(number, text):
    assert short_count(int(number)) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00:00"), (3723, "1:02:03"), (359_999, "99:59:59"), (360_000, "4d 04h")]
)
def test_times_are_short(seconds, text):
    assert short_time(seconds) == text


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
