"""`midus train` from the outside: what it prints, what it writes, how it exits."""

import pytest
from processes.warm import run_ranks
from training.outcomes import assert_close_weights, by_step, logged
from training.tiny_run import refused
from training.two_processes import SCRIPT
from transformers import AutoModelForCausalLM

from midus_hf.cli.train import main

FAILS_IF_THE_GROUP_IS_NOT_LEFT = """
import atexit, os, pathlib, runpy, sys, torch.distributed

def fail_if_the_group_is_not_left():
    threads = [file.read_text() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
    if torch.distributed.is_initialized() or any("gloo" in thread for thread in threads):
        os._exit(99)

atexit.register(fail_if_the_group_is_not_left)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.fixture
def words(words) -> list[str]:
    """A recipe and what it needs: config, model, corpus, output."""
    return [*words, "--max_steps=5", "--learning_rate=1e-2"]


def test_it_trains_resumes_and_leaves_a_model(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*words, "--save_steps=3"]) == 0
    printed = capsys.readouterr().out
    assert "Training new: " in printed and "layers 1, 4" in printed
    assert printed.splitlines()[-1].startswith(f"{tmp_path / 'out'}: 5 steps, 160 tokens, loss ")
    losses = logged(tmp_path / "out")
    assert list(by_step(tmp_path / "out", "loss")) == [1, 2, 3, 4, 5]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    assert main([*words, "--save_steps=3", f"--resume_from_checkpoint={tmp_path / 'out' / 'checkpoint-3'}"]) == 0
    assert logged(tmp_path / "out") == losses


def test_two_processes_share_a_batch_and_train_as_one_would(words, corpus, tmp_path):
    words += [f"--eval_text={corpus}", "--eval_steps=2", "--save_steps=2", "--load_best_model_at_end=true"]
    # Gloo's threads abort, now and then, a process that still has them at its exit: here it always fails.
    spy = tmp_path / "spy.py"
    spy.write_text(FAILS_IF_THE_GROUP_IS_NOT_LEFT)
    shared = run_ranks(
        spy, SCRIPT, *words, "--per_device_train_batch_size=1", f"--output_dir={tmp_path / 'shared'}", COLUMNS="120"
    )
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout.count("Training new: ") == shared.stdout.count(": 5 steps, 160 tokens") == 1
    assert shared.stdout.count("'eval_perplexity': ") == 3
    assert main(words) == 0

    one, shared = tmp_path / "out", tmp_path / "shared"
    for name, count in (("loss", 5), ("eval_perplexity", 3)):
        assert logged(shared, name) == pytest.approx(logged(one, name), rel=1e-5) and len(logged(one, name)) == count
    folders = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("shared", "out")]
    assert folders[0] == folders[1] and {"checkpoint-4", "checkpoint-5"} <= set(folders[0])
    assert_close_weights(one, shared)


def test_a_wrong_request_is_told_in_one_line_and_writes_nothing(words, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("w3")
    assert main([*words, f"--corpus={tmp_path / 'short.txt'}"]) == 2
    out, err = capsys.readouterr()
    message = "midus train: corpus has 2 tokens; expected at least one sequence of 16 tokens. Add text, or lower sequence_length"
    assert out == "" and err.startswith(message) and err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()


def test_a_failure_of_the_work_raises(words, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("broken inside")

    monkeypatch.setattr("midus_hf.training.trainer.MemoryTrainer.training_step", fail)
    with refused(r"broken inside"):
        main(words)
