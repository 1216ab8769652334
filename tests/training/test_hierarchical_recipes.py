"""The recipes of hierarchical memories have the paper's settings, and their models the paper's sizes."""

from pathlib import Path

import pytest

from midus_hf.config.yaml_options import read_config, read_mapping
from midus_hf.training.options import TrainConfig
from tests.upscalers.real_configs import LLAMA_3_2_1B, write_config
from upscalers.runs.upscale import upscale

CONFIGS = Path(__file__).parents[2] / "configs"
QWEN2_5_0_5B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GEMMA_3_270M = {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "torch_dtype": "bfloat16",
}
# Id, config, and what table 2 prints of each: millions that are fetched, billions of the bank.
BASES = {
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", LLAMA_3_2_1B, (102.2, 14.1)),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", QWEN2_5_0_5B, (43.4, 11.1)),
    "gemma-3-270m": ("google/gemma-3-270m", GEMMA_3_270M, (23.2, 5.9)),
}


def test_every_recipe_is_checked():
    for folder in ("train", "upscale"):
        assert {path.stem for path in (CONFIGS / folder).glob("hier-*.yaml")} == {f"hier-ffn-{name}" for name in BASES}


@pytest.mark.parametrize("name", BASES)
def test_a_model_has_the_sizes_of_table_2(name, tmp_path):
    base, config, (fetched, bank) = BASES[name]
    recipe = read_mapping(CONFIGS / "upscale" / f"hier-ffn-{name}.yaml")
    assert recipe["base"] == base
    folder = write_config(tmp_path / "base", config)
    counts = upscale(base=folder, method=recipe["method"], options=recipe["options"], dry_run=True).parameters
    assert counts.new == 0 and counts.trainable == counts.bank
    assert (round(counts.fetched / 1e6, 1), round(counts.bank / 1e9, 1)) == (fetched, bank)


@pytest.mark.parametrize("name", BASES)
def test_a_run_has_the_papers_settings(name):
    """Appendices A.2 and A.6."""
    config = read_config(TrainConfig, CONFIGS / "train" / f"hier-ffn-{name}.yaml", [])
    assert config.model_name_or_path == f"{name}-hier" and config.corpora[0].path_column == "memory_ids"
    assert (config.trainable, config.generic_share, config.document_mask) == ("new", 0, False)
    assert (config.value_learning_rate, config.value_schedule, config.value_weight_decay) == (1e-4, "fixed", 1e-3)
    assert (config.adam_beta2, config.max_grad_norm, config.bf16) == (0.95, 1.0, True)
    assert config.value_learning_rate * config.min_learning_rate_ratio == pytest.approx(1e-5)
    tokens_per_step = config.sequence_length * config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert (tokens_per_step, tokens_per_step * config.max_steps) == (2**21, 2**40)
    assert round(config.warmup_ratio * config.max_steps, -2) == 5000
