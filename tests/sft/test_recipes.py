"""The recipes in `configs/sft` are read and say what the papers say."""

import dataclasses
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus_hf.cli.sft import main
from midus_hf.cli.train import read_arguments
from midus_hf.training.sft.arguments import SftArguments
from midus_hf.training.sft.rows import CHATML

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "configs" / "sft"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe(name: str, changes: Sequence[str] = ()) -> SftArguments:
    path = RECIPES / f"{name}.yaml"
    stated = {line.partition(":")[0] for line in path.read_text(encoding="utf-8").splitlines()}
    given = [f"--{key}=x" for key in ("model_name_or_path", "output_dir", "dataset_name") if key not in stated]
    return read_arguments("sft", [str(path), *given, *changes])


def test_there_is_a_recipe_of_each_run():
    assert NAMES == ["demo", "midus-hml", "moc-371m"]


@pytest.mark.parametrize(
    "words", ["", "--learning_rate 1.0e-6 --per_device_train_batch_size 2 --gradient_accumulation_steps 32"]
)
def test_the_recipe_of_midus_has_its_hyperparameters_and_starts_from_what_its_pretraining_makes(words):
    """Appendix B.1: at 8B the lower of the two rates that are searched."""
    config = recipe("midus-hml", words.split())
    text = (RECIPES / "midus-hml.yaml").read_text(encoding="utf-8")
    assert all(word in text for word in words.split())
    assert config.learning_rate == (1e-6 if words else 1e-5) and config.trainable == "all"
    assert (config.lr_scheduler_type, config.warmup_steps, config.bf16) == ("cosine", 0.1, True)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64 and config.max_length == 2048
    pretraining = REPOSITORY / "configs" / "train" / "midus-hml.yaml"
    assert f"output_dir: {config.model_name_or_path}\n" in pretraining.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("variant", "memory", "values", "frozen"),
    [("bank frozen", 1.5e-5, None, ["value"]), (None, 1.5e-5, 5e-6, []), ("bank at the rate", None, None, [])],
)
def test_the_recipe_of_mixture_of_chapters_names_how_the_bank_can_train(variant, memory, values, frozen):
    text = (RECIPES / "moc-371m.yaml").read_text(encoding="utf-8")
    line = next((line for line in text.splitlines() if variant and line.startswith(f"#   {variant}")), ":")
    config = recipe("moc-371m", shlex.split(line.partition(":")[2]))
    assert (config.learning_rate, config.memory_learning_rate, config.value_learning_rate) == (3e-5, memory, values)
    assert config.frozen == frozen and config.trainable == "all"
    assert config.value_schedule == (None if frozen else "fixed")
    assert (config.weight_decay, config.adam_beta2, config.lr_scheduler_kwargs) == (0.1, 0.95, {"min_lr_rate": 0.1})
    assert config.value_weight_decay == (0 if frozen else 0.1)
    assert config.warmup_steps == 250
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 128


@pytest.mark.parametrize("name", NAMES)
def test_the_command_in_a_recipe_runs_it(name):
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^#   midus sft (\S+)", text, flags=re.MULTILINE) == [f"configs/sft/{name}.yaml"]


TRL_RECIPE = """
model_name_or_path: {model}
attn_implementation: sdpa
dataset_name: {chats}
dataset_train_split: train
learning_rate: 2.0e-5
lr_scheduler_type: cosine
optim: adamw_torch
max_steps: 2
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_length: 96
packing: false
assistant_only_loss: true
bf16: false
logging_steps: 1
save_steps: 2
save_total_limit: 1
report_to: none
seed: 42
"""


def test_a_recipe_in_the_words_of_trl_trains(base, chats, tmp_path, monkeypatch):
    """Train with keys that are all of TRL's own dataclasses; the output is where Transformers puts it."""
    trl = pytest.importorskip("trl")
    model = shutil.copytree(base("llama", True), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    recipe = tmp_path / "sft_config.yaml"
    recipe.write_text(TRL_RECIPE.format(model=model, chats=chats))
    of_trl = {
        field.name
        for options in (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig)
        for field in dataclasses.fields(options)
    }
    assert set(yaml.safe_load(recipe.read_text())) <= of_trl
    monkeypatch.chdir(tmp_path)
    assert main([str(recipe)]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "trainer_output")
