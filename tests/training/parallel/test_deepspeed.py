"""Two processes that share moments, gradients and parameters by DeepSpeed train as one that has all: `make test-deepspeed`."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sft.tiny_chats import chat, save_base, write_rows
from training.outcomes import largest_difference, logged
from training.parallel import two_processes as checks
from training.tiny_run import save_upscaled, write_recipe

from midus_hf.cli.sft import main as sft
from midus_hf.cli.train import main

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "accelerate" / "zero3.yaml"


def launched(*words, stage: int = 3, settings: Path | None = None) -> subprocess.CompletedProcess:
    """What `accelerate launch` starts, by the config of the third stage; else as accelerate is told by variables."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
    if settings is not None:
        environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(settings)}
    elif stage == 3:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG)]
        command += ["--num_processes", "2", "--main_process_port", "0"]
        environment = {}
    environment |= {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command += ["-m", "midus_hf", *map(str, words)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


def trained(*words, **launch) -> None:
    run = launched("train", *words, **launch)
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("method", checks.METHODS)
def test_processes_of_deepspeed_train_as_one(method, stage, corpus, tmp_path):
    checks.assert_shared_run_is_that_of_one(method, functools.partial(trained, stage=stage), corpus, tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_exactly(stage, corpus, tmp_path):
    checks.assert_shared_run_goes_on_exactly(functools.partial(trained, stage=stage), corpus, tmp_path)


def test_tied_tensors_of_half_precision_are_saved_once_and_in_it(corpus, tmp_path):
    checks.assert_tied_tensors_are_saved_once(trained, corpus, tmp_path)


# A file of DeepSpeed's own, by which nothing is whole but where it is needed.
SETTINGS = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


def test_what_trains_is_counted_where_every_parameter_is_cut(corpus, tmp_path):
    recipe = write_recipe(tmp_path, save_upscaled("llama", tmp_path), corpus)
    assert main([str(recipe), "--per_device_train_batch_size=4", f"--output_dir={tmp_path / 'one'}"]) == 0
    (tmp_path / "deepspeed.json").write_text(json.dumps(SETTINGS))
    trained(recipe, f"--output_dir={tmp_path / 'two'}", settings=tmp_path / "deepspeed.json")
    one, two = tmp_path / "one", tmp_path / "two"
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    assert logged(two, "trained_parameters") == logged(one, "trained_parameters") != []
    assert largest_difference(two, one) < 1e-4


def test_chats_are_trained_on_as_by_one_process(tmp_path):
    model = save_base("llama", tmp_path, "midus-hml")
    chats = write_rows(tmp_path / "chats.jsonl", [{"messages": chat(number)} for number in range(16)])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {model}\ndataset_name: {chats}\nchat_template_path: chatml\nmax_length: 96\n"
        "per_device_train_batch_size: 2\nmax_steps: 4\n"
        "learning_rate: 1.0e-3\nbf16: false\nlogging_steps: 1\ntrainable: all\n"
    )
    assert sft([str(recipe), "--per_device_train_batch_size=4", f"--output_dir={tmp_path / 'one'}"]) == 0
    run = launched("sft", recipe, f"--output_dir={tmp_path / 'two'}")
    assert run.returncode == 0, run.stderr[-4000:]
    one, two = (logged(tmp_path / folder, "loss") for folder in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)
    assert len(one) == 4
