"""The recipes that begin from a config say what the paper of Mixture of Chapters says, and train a model of its size."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training.test_ultramem_recipes import TABLE_7
from training.tiny_run import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from midus_hf import models  # noqa: F401 - registers the families that host memory
from midus_hf.config.memories.chapters import PAPER, ChaptersOptions
from midus_hf.config.memory_entries import read_memories
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.yaml_options import read_config
from midus_hf.training.options import TrainConfig
from midus_hf.training.run.train import train
from midus_hf.training.run.training_log import read_log

REPOSITORY = Path(__file__).parents[2]
PARAMETERS = {"moc-371m": 371_292_932, "vanilla-148m": 147_874_560, "vanilla-203m": 202_937_088}
"""Parameters of the models, by the names of their recipes (appendix A.4.1)."""


MODA = ("olmo2-669m", "moda-706m", "moda-74m", "moda-128m")
"""Recipes of Mixture-of-Depths Attention."""


def recipe_path(name: str) -> Path:
    return REPOSITORY / "configs" / "train" / f"{name}.yaml"


def model_config(name: str) -> dict[str, Any]:
    return json.loads((REPOSITORY / "configs" / "models" / f"{name}.json").read_text())


def test_every_config_has_a_recipe_that_is_tested():
    configs = {path.stem for path in (REPOSITORY / "configs" / "models").glob("*.json")}
    assert configs == set(PARAMETERS) | set(TABLE_7) | set(MODA)


@pytest.mark.parametrize("name", MODA)
def test_recipes_of_attention_over_the_depth_have_the_settings_of_its_paper(name):
    """Section 4: 1,024 sequences of 4,096 tokens a step, 400B in all, 2,000 steps up to 3e-4 and a cosine down to 3e-5."""
    config = read_config(TrainConfig, recipe_path(name))
    assert (config.model, config.model_config, config.trainable) == (None, f"configs/models/{name}.json", "all")
    assert config.batch_size * config.gradient_accumulation == 1024
    assert config.sequence_length == model_config(name)["max_position_embeddings"]
    assert config.max_steps == int(4e11 / 1024 / 4096)
    assert (config.learning_rate, config.schedule, config.min_learning_rate_ratio) == (3e-4, "cosine", 0.1)
    assert config.warmup_steps(config.max_steps) == 2000
    assert (config.weight_decay, config.adam_beta2, config.max_grad_norm) == (0.1, 0.95, 1.0)


@pytest.mark.parametrize("name", MODA[1:])
def test_configs_of_attention_over_the_depth_write_every_option_out(name):
    config = model_config(name)
    (entry,) = config["memory"]
    sizes = ModelSizes(hidden_size=config["hidden_size"], num_heads=16, num_layers=config["num_hidden_layers"])
    (read,) = read_memories([entry], sizes).entries
    assert entry == read.to_dict() and read.layers == tuple(range(config["num_hidden_layers"]))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipe_has_the_papers_settings(name):
    """Table 6."""
    config = read_config(TrainConfig, recipe_path(name))
    assert (config.model, config.model_config) == (None, f"configs/models/{name}.json")
    assert (config.tokenizer, config.trainable) == ("HuggingFaceTB/SmolLM2-135M", "all")
    assert (config.sequence_length, config.batch_size, config.gradient_accumulation) == (1024, 32, 4 * 8)
    assert (config.learning_rate, config.weight_decay, config.adam_beta2, config.max_grad_norm) == (
        3e-4,
        0.1,
        0.95,
        1.0,
    )
    assert (config.precision, config.activation_checkpointing) == ("bf16", True)
    assert config.max_steps == 9600
    assert (config.schedule, config.min_learning_rate_ratio) == ("warmup_stable_decay", 0.1)
    assert config.warmup_steps(config.max_steps) == 250
    assert config.max_steps - config.scheduler_options(config.max_steps)["num_decay_steps"] == 8160
    rates = (config.memory_learning_rate, config.value_learning_rate, config.value_schedule, config.value_weight_decay)
    assert rates == ((6e-4, 6e-4, "fixed", 0.1) if name == "moc-371m" else (None, None, "constant", 0))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipe_says_how_it_is_run(name):
    assert re.findall(r"^#   (.+)$", recipe_path(name).read_text(), flags=re.MULTILINE) == [
        f"midus-train configs/train/{name}.yaml"
    ]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_the_papers_shape_and_parameters(name):
    """Table 5."""
    config = AutoConfig.from_pretrained(REPOSITORY / "configs" / "models" / f"{name}.json")
    assert config.num_hidden_layers == (24 if name == "vanilla-203m" else 16)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (768, 2304, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (12, 4)
    assert (config.rope_parameters["rope_theta"], config.tie_word_embeddings) == (100_000, True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == PARAMETERS[name]
    assert type(model).__name__ == config.architectures[0]


def test_the_memory_is_the_papers_with_every_option_written_out():
    (entry,) = model_config("moc-371m")["memory"]
    sizes = ModelSizes(hidden_size=768, num_heads=12, num_layers=16)
    (read,) = read_memories([entry], sizes).entries
    assert entry == read.to_dict()
    assert read.options == ChaptersOptions(**PAPER, heads=12, kv_heads=12)
    assert (read.site, read.layers) == ("behind-attention", (2, 6, 10, 14))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_small_copy_trains(name, corpus, tmp_path):
    small = {**model_config(name), "vocab_size": 128, "hidden_size": 48, "intermediate_size": 64, "head_dim": 4}
    for entry in small.get("memory", []):
        entry |= {"memory_tokens": 32, "chapters": 8, "k": 2}
    (tmp_path / "config.json").write_text(json.dumps(small))
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    words = {
        "model_config": tmp_path / "config.json",
        "tokenizer": tmp_path / "tokenizer",
        "output": tmp_path / "out",
        "corpus": corpus,
        "sequence_length": 16,
        "batch_size": 4,
        "gradient_accumulation": 1,
        "max_steps": 3,
        "log_every": 1,
    }
    overrides = [f"{key}={value}" for key, value in words.items()]
    assert train(read_config(TrainConfig, recipe_path(name), overrides)).steps == 3
    assert len([event for event in read_log(tmp_path / "out" / "log.jsonl") if "loss" in event]) == 3
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    started_at_zero = [
        tensor for key, tensor in trained.state_dict().items() if key.endswith("output_projection.weight")
    ]
    assert len(started_at_zero) == (4 if name == "moc-371m" else 0)
    assert all(tensor.any() for tensor in started_at_zero)
