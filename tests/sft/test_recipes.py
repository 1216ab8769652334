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

RECIPES = Path(__file__).parents[2] / "configs" / "sft"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe(name: str, changes: Sequence[str] = ()) -> SftArguments:
    path = RECIPES / f"{name}.yaml"
    stated = {line.partition(":")[0] for line in path.read_text(encoding="utf-8").splitlines()}
    given = [f"--{key}=x" for key in ("model_name_or_path", "output_dir", "dataset_name") if key not in stated]
    return read_arguments("sft", [str(path), *given, *changes])


@pytest.mark.parametrize(
    ("variant", "rates", "frozen"),
    [("bank frozen", (1.5e-5, None), ["value"]), (None, (1.5e-5, 5e-6), []), ("bank at the rate", (None, None), [])],
)
def test_the_recipe_of_mixture_of_chapters_names_how_the_bank_can_train(variant, rates, frozen):
    text = (RECIPES / "moc-371m.yaml").read_text(encoding="utf-8")
    line = next((line for line in text.splitlines() if variant and line.startswith(f"#   {variant}")), ":")
    config = recipe("moc-371m", shlex.split(line.partition(":")[2]))
    assert (config.memory_learning_rate, config.value_learning_rate) == rates
    assert (config.frozen, config.value_schedule) == (frozen, None if frozen else "fixed")


@pytest.mark.parametrize("name", NAMES)
def test_the_command_in_a_recipe_runs_it(name):
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^#   midus sft (\S+)", text, flags=re.MULTILINE) == [f"configs/sft/{name}.yaml"]
    model = recipe(name).model_name_or_path
    if name == "midus-hml":  # which starts from what its pretraining makes
        assert f"output_dir: {model}\n" in (RECIPES.parent / "train" / f"{name}.yaml").read_text(encoding="utf-8")


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
    of_trl = map(dataclasses.fields, (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    names = {field.name for fields in of_trl for field in fields}
    assert set(yaml.safe_load(recipe.read_text())) <= names
    monkeypatch.chdir(tmp_path)
    assert main([str(recipe)]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "trainer_output")
