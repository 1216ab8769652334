"""Ctrl-C and SIGTERM end a run in order, and what is resumed goes on as if nothing had happened."""

import signal
import time
from unittest.mock import Mock

import pytest
from pairs import by_default
from processes.warm import MIDUS, run_ranks
from training.outcomes import assert_same_run
from training.tiny_run import AtStep, PreparedRun, interrupted, signal_at, write_corpus

from midus_hf.cli.train import main
from midus_hf.training.checkpoints import find_latest_complete as last_checkpoint
from midus_hf.training.run import run_training
from midus_hf.training.trainer import MemoryTrainer

# Ranks that are named hear SIGINT when they would update parameters for the third time.
INTERRUPTED = f"""
import itertools, os, signal, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook

rank, count = sys.argv.pop(1), itertools.count(1)

def interrupt(*_):
    if next(count) == 3:
        signal.raise_signal(signal.SIGINT)

if rank in ("all", os.environ["RANK"]):
    register_optimizer_step_pre_hook(interrupt)
{MIDUS}
"""
HINT = "Stopping after this step, with a checkpoint; interrupt again to stop at once."


def test_interrupted_run_skips_evaluation_and_resumes_exactly(config_for, tmp_path):
    held_out = write_corpus(tmp_path / "held-out", 2)
    options = {"gradient_accumulation_steps": 2, "max_steps": 12, "eval_text": str(held_out)}
    run_training(config_for("whole", **options))
    run, measured = PreparedRun(config_for("parts", **options)), []
    run.trainer.evaluate = lambda *_, **__: measured.append(run.trainer.state.global_step) or {}
    stopped = interrupted(run, 7, signal.SIGTERM)
    assert not [step for step in measured if step >= 7]
    saved = tmp_path / "parts" / "checkpoint-7"
    assert str(stopped) == f"interrupted after step 7; --resume_from_checkpoint true continues from {saved}"
    assert stopped.signal_number == signal.SIGTERM
    assert last_checkpoint(tmp_path / "parts") == saved and not (tmp_path / "parts" / "config.json").exists()
    run_training(config_for("parts", resume_from_checkpoint=True, **options))
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_signal_in_the_last_step_changes_nothing(config_for, tmp_path):
    run = PreparedRun(config_for(max_steps=3))
    run.trainer.add_callback(signal_at(3))
    assert run.execute().steps == 3
    assert (tmp_path / "out" / "config.json").exists() and last_checkpoint(tmp_path / "out") is None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_tells_how_to_go_on_and_has_no_traceback(number, status, words, tmp_path, monkeypatch, capfd):
    train = MemoryTrainer.train

    def signalled(trainer, checkpoint):
        trainer.add_callback(signal_at(3, number))
        return train(trainer, checkpoint)

    monkeypatch.setattr(MemoryTrainer, "train", signalled)
    assert main(words) == status
    saved, err = last_checkpoint(tmp_path / "out"), capfd.readouterr().err
    line = f"midus train: interrupted after step 3; --resume_from_checkpoint true continues from {saved}"
    assert saved.name == "checkpoint-3" and err.splitlines()[-1] == line
    assert HINT in err and "Traceback" not in err


def test_a_second_signal_stops_at_once(config_for, tmp_path):
    def signal_twice(model):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # a launcher that passes on what the terminal has sent already
        time.sleep(1.1)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("nothing stopped")

    run = PreparedRun(config_for())
    run.trainer.add_callback(AtStep(1, signal_twice))
    with pytest.raises(KeyboardInterrupt) as raised:
        run.execute()
    assert raised.type is KeyboardInterrupt and last_checkpoint(tmp_path / "out") is None


def test_before_training_an_interruption_writes_nothing(words, tmp_path, monkeypatch):
    monkeypatch.setattr("midus_hf.training.run.load_for_training", Mock(side_effect=KeyboardInterrupt))
    assert main(words) == 130 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rank", "hints"), by_default([("1", 0)], [("all", 1), ("1", 0)]))
def test_all_processes_stop_at_the_same_step(words, tmp_path, rank, hints):
    run = run_ranks(INTERRUPTED, rank, "train", *words)
    assert run.returncode == 130 and run.stderr.count(HINT) == hints
    saved = tmp_path / "out" / "checkpoint-3"
    assert last_checkpoint(tmp_path / "out") == saved
    assert run.stderr.count(f"interrupted after step 3; --resume_from_checkpoint true continues from {saved}") == 1
    assert {path.name for path in saved.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
