"""The recipes of UltraMemV2's open models say what its paper and release say, and train models of the sizes of its table 7."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from training.tiny_run import tiny_tokenizer

from midus_hf.config.memories.ultramem import UltraMemOptions
from midus_hf.config.memory_entries import read_memories
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.parameters import count_parameters
from midus_hf.config.yaml_options import read_config
from midus_hf.training.options import TrainConfig
from midus_hf.training.run.train import train
from midus_hf.training.run.training_log import read_log

REPOSITORY = Path(__file__).parents[2]
TABLE_7 = {
    "ultramem-v2-227m-1.2b": {"layers": 20, "hidden": 768, "heads": 12, "n": 360, "key": 192, "k": 32, "value": 192, "pre": 192},
    "ultramem-v2-1b-7b": {"layers": 16, "hidden": 2048, "heads": 16, "n": 528, "key": 512, "k": 128, "value": 768, "pre": 384},
}  # fmt: skip
"""Rows of the paper's table 7: layers, hidden size, heads, and n, D_k, k, D_v and D_p of the memory."""


def model_config(name: str) -> dict[str, Any]:
    return json.loads((REPOSITORY / "configs" / "models" / f"{name}.json").read_text())


def sizes_in_millions(config: dict[str, Any]) -> tuple[float, float, float]:
    """Parameters that a token uses, with and without embeddings, and all of them but embeddings."""
    counts = count_parameters(config)
    sizes = (counts.activated, counts.activated - counts.embeddings, counts.total - counts.embeddings)
    used, used_without, total_without = (size / 1e6 for size in sizes)
    return used, used_without, total_without


@pytest.mark.parametrize("name", TABLE_7)
def test_a_config_has_the_row_of_its_table_with_every_option_written_out(name):
    config, row = model_config(name), TABLE_7[name]
    (entry,) = config["memory"]
    sizes = ModelSizes(hidden_size=row["hidden"], num_heads=row["heads"], num_layers=row["layers"])
    (read,) = read_memories([entry], sizes).entries
    assert entry == read.to_dict()
    assert read.options == UltraMemOptions(
        n=row["n"], k=row["k"], key_width=row["key"], value_width=row["value"], pre_value_width=row["pre"], zero="none"
    )
    assert (read.site, read.layers) == ("beside-ffn", tuple(range(row["layers"])))
    assert (config["num_hidden_layers"], config["hidden_size"]) == (row["layers"], row["hidden"])
    assert config["num_attention_heads"] == config["num_key_value_heads"] == row["heads"]


def test_the_smaller_model_has_the_parameters_of_table_7():
    """225 M of 1.18 B: what a token uses counts embeddings there, and the total does not, as in the table's row of OLMoE."""
    used, _, total = sizes_in_millions(model_config("ultramem-v2-227m-1.2b"))
    assert abs(used - 225) < 1 and round(total / 1e3, 2) == 1.18


def test_the_larger_model_has_what_a_token_uses_and_not_the_total():
    """1,079 M of 6.70 B, both without embeddings. With 528 keys, as the table says, the total is 6.21 B; with 552 it is 6.69 B."""
    config = model_config("ultramem-v2-1b-7b")
    _, used, total = sizes_in_millions(config)
    assert round(used) == 1079 and round(total / 1e3, 2) == 6.21
    assert round(100 * (1 - total / 6700), 1) == 7.2
    (entry,) = config["memory"]
    _, used, total = sizes_in_millions({**config, "memory": [{**entry, "n": 552}]})
    assert round(used) == 1080 and round(total / 1e3, 2) == 6.69


@pytest.mark.parametrize(
    ("name", "sequences", "tokens"), [("ultramem-v2-227m-1.2b", 768, 5e11), ("ultramem-v2-1b-7b", 1024, 1e12)]
)
def test_a_recipe_has_the_settings_of_the_release(name, sequences, tokens):
    path = REPOSITORY / "configs" / "train" / f"{name}.yaml"
    config = read_config(TrainConfig, path)
    assert (config.model, config.model_config) == (None, f"configs/models/{name}.json")
    assert config.batch_size * config.gradient_accumulation == sequences
    assert config.max_steps == tokens // (sequences * config.sequence_length)
    assert (config.learning_rate, config.value_learning_rate, config.value_schedule) == (4e-4, 4e-4, "4x-to-1x")
    assert (config.memory_keys, config.weight_decay, config.value_weight_decay) == ("weights", 0.1, 0.1)
    assert (config.schedule, config.min_learning_rate_ratio, config.adam_beta2) == ("cosine", 0.1, 0.95)
    assert abs(config.warmup_ratio * tokens - 1e10) < 6e8
    words = re.findall(r"^#   (.+)$", path.read_text(), flags=re.MULTILINE)
    assert words == [f"midus-train configs/train/{name}.yaml"]


@pytest.mark.parametrize("name", TABLE_7)
def test_a_small_copy_trains(name, corpus, tmp_path):
    small = {
        **model_config(name),
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 64,
        "head_dim": 4,
        "num_hidden_layers": 2,
    }
    (entry,) = small["memory"]
    entry |= {"n": 8, "k": 4, "key_width": 6, "value_width": 12, "pre_value_width": 4, "layers": [0, 1]}
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
    assert train(read_config(TrainConfig, REPOSITORY / "configs" / "train" / f"{name}.yaml", overrides)).steps == 3
    assert len([event for event in read_log(tmp_path / "out" / "log.jsonl") if "loss" in event]) == 3
