"""A run of two processes of which one is killed goes on, by as many processes or others, as if nothing had happened."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes.warm import run_ranks
from training.outcomes import as_it_was_at, assert_same_run, largest_difference, logged
from training.tiny_run import save_upscaled
from training.two_processes import SCRIPT, in_two_processes, write_recipe

from midus_hf.cli.training.train import main
from midus_hf.training.output.run_checkpoints import last_checkpoint

KILLER = Path(__file__).with_name("killed_rank.py")
# Which process is killed where, and the step of the latest checkpoint that is whole then; `...` where nobody knows.
KILLS = {
    "before-its-random-state": (1, "save", "checkpoint-4/rng_state_1.pth", 2),
    "in-a-step": (1, "step", "4", 2),
    "before-the-optimizer": (0, "save", "checkpoint-4/optimizer.pt", 2),
    "before-the-last-file": (0, "open", "checkpoint-4/trainer_state.json", 2),
    "before-the-first-checkpoint": (1, "step", "2", None),
    "sometime": (0, "seconds", f"{random.Random().uniform(0, 1):.3f}", ...),
}
PRODUCT = [name for name in KILLS if name != "before-its-random-state"]


@pytest.fixture(scope="module")
def recipe(corpus, tmp_path_factory) -> Path:
    """A run that saves a checkpoint every two steps."""
    folder = tmp_path_factory.mktemp("restarts")
    options = {"save_steps": 2, "save_total_limit": "null", "usage_steps": 1}
    return write_recipe(folder, save_upscaled("llama", folder), corpus, **options)


@pytest.fixture(scope="module")
def whole(recipe) -> Path:
    """The same run in two processes that nobody disturbed."""
    output = recipe.with_name("whole")
    in_two_processes(recipe, f"output_dir={output}")
    return output


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.product) if name in PRODUCT else name for name in KILLS]
)
def test_a_killed_run_that_torchrun_starts_again_is_the_run_that_nobody_disturbed(name, recipe, whole, tmp_path):
    rank, kind, point, latest = KILLS[name]
    words = [recipe, f"output_dir={tmp_path / 'out'}"]
    killed = run_ranks(KILLER, rank, kind, point, SCRIPT, *words)
    assert killed.returncode != 0, "one is killed, and the other fails without it"
    left = last_checkpoint(tmp_path / "out")
    if latest is not ...:
        assert (left and left.name) == (latest and f"checkpoint-{latest}")
    again = run_ranks(SCRIPT, *words, TORCHELASTIC_RESTART_COUNT="1")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count(f"going on from {left}\n") == (left is not None)
    assert_same_run(tmp_path / "out", whole)


def test_one_process_goes_on_where_two_were_with_steps_of_as_many_sequences(recipe, whole, tmp_path, capsys):
    output = as_it_was_at(2, whole, tmp_path / "out")
    assert main([str(recipe), f"output_dir={output}", "resume_from_checkpoint=true"]) == 0
    assert (
        "gradient_accumulation_steps is 2 in place of 1, for as many sequences per step as before\n"
        in capsys.readouterr().out
    )
    assert_about_the_same(output, whole)


@pytest.mark.product
@pytest.mark.parametrize(
    "words", [[], ["per_device_train_batch_size=2", "gradient_accumulation_steps=1"]], ids=["as-it-is", "one-pass"]
)
def test_two_processes_go_on_where_one_was(words, recipe, whole, tmp_path):
    one = [
        str(recipe),
        "per_device_train_batch_size=2",
        "gradient_accumulation_steps=2",
        f"output_dir={tmp_path / 'out'}",
    ]
    assert main(one) == 0
    output = as_it_was_at(2, tmp_path / "out", tmp_path / "resumed")
    in_two_processes(
        recipe, "gradient_accumulation_steps=2", *words, f"output_dir={output}", "resume_from_checkpoint=true"
    )
    assert_about_the_same(output, whole)


def test_processes_agree_on_the_checkpoint_that_is_whole(recipe, whole, tmp_path):
    output = as_it_was_at(2, whole, tmp_path / "out")
    shutil.copytree(whole / "checkpoint-4", output / "checkpoint-4")
    weights = output / "checkpoint-4" / "rng_state_1.pth"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    told = in_two_processes(recipe, f"output_dir={output}", "resume_from_checkpoint=auto").stderr
    line = "checkpoint-4 is passed over: rng_state_1.pth does not have the contents that were written\n"
    assert told.count(line) == 1 and told.count("is passed over") == 1
    assert_same_run(output, whole)


def test_a_gradient_that_is_not_finite_in_one_process_ends_all(recipe, tmp_path):
    ended = run_ranks(KILLER, 1, "spoil", "3", SCRIPT, recipe, f"output_dir={tmp_path / 'out'}", timeout=120)
    assert ended.returncode == 1
    assert re.search(r"(gradient norm|loss) is (inf|nan).* at step 3; expected a finite number", ended.stderr)
    assert last_checkpoint(tmp_path / "out").name == "checkpoint-2" and not (tmp_path / "out" / "config.json").exists()


def assert_about_the_same(output: Path, whole: Path) -> None:
    """As of two runs that add the same numbers in another order."""
    for name, tolerance in (("loss", 1e-5), ("memory_used_share", 1e-6)):
        assert (
            logged(output, name) == pytest.approx(logged(whole, name), rel=tolerance)
            and len(logged(output, name)) == 6
        )
    assert largest_difference(output, whole) < 1e-4


@pytest.mark.product
def test_torchrun_starts_a_run_again_whose_process_was_killed_and_it_goes_on(recipe, whole, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "1"]
    words = [KILLER, "1", "step", "4", SCRIPT, recipe, f"output_dir={tmp_path / 'out'}"]
    done = subprocess.run(
        [*launcher, *words],
        capture_output=True,
        text=True,
        timeout=300,
        # Else torch's launcher keeps what processes had told each other before, which those that are new take for true.
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"going on from {tmp_path / 'out' / 'checkpoint-2'}\n") == 1
    assert_same_run(tmp_path / "out", whole)
