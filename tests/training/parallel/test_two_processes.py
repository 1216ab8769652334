"""Two processes that share a batch train as one would, and the first of them speaks."""

import pytest
from processes.warm import run_ranks
from training.outcomes import assert_close_weights, logged
from training.parallel.two_processes import SCRIPT

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


def test_two_processes_share_a_batch_and_train_as_one_would(words, corpus, tmp_path):
    words += ["--max_steps=5", "--learning_rate=1e-2", "--save_steps=2", "--load_best_model_at_end=true"]
    words += [f"--eval_text={corpus}", "--eval_steps=2"]
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
    for name, count in (("loss", 5), ("eval_loss", 3)):  # of which the perplexity is the exponential
        assert logged(shared, name) == pytest.approx(logged(one, name), rel=1e-5) and len(logged(one, name)) == count
    folders = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("shared", "out")]
    assert folders[0] == folders[1] and {"checkpoint-4", "checkpoint-5"} <= set(folders[0])
    assert_close_weights(one, shared)
