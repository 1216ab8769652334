"""Parameters that are counted from a config: those of the paper, and those that models have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import NATIVE_FAMILIES
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from midus_hf import models  # noqa: F401 - registers the families that host memory
from upscalers.architecture.flops import count_flops as estimate_flops
from upscalers.architecture.flops import count_parameters

MODELS = Path(__file__).parents[2] / "configs" / "models"
# Entries of memories, and how many numbers their banks hold.
MEMORIES: list[tuple[dict[str, Any], int]] = [
    ({"type": "midus-hml", "n": 4, "k": 2, "query_norm": "batch", "layers": [1]}, 16 * 8),
    ({"type": "midus-hml", "n": 4, "k": 2, "output_projection": True, "layers": [0, 2]}, 2 * 16 * 8),
    ({"type": "midus-pkm", "n": 4, "k": 2, "layers": [1]}, 16 * 32),
    ({"type": "midus-linear", "slots": 8, "layers": [3]}, 8 * 32),
    ({"type": "moc", "share": "all", "layers": [0, 2, 3]}, 4096 * 32),
    ({"type": "moc", "share": "every:2", "layers": [0, 2, 3]}, 2 * 4096 * 32),
    ({"type": "moc", "share": "none", "layers": [0, 2]}, 2 * 4096 * 32),
    ({"type": "ultramem-v2", "n": 8, "k": 2, "layers": [0, 1, 3]}, 3 * 64 * (6 + 2)),
    ({"type": "ultramem-v2", "n": 8, "k": 2, "pre_value_width": 0, "share": "all", "layers": [0, 2]}, 64 * 6),
    ({"type": "ultramem-v2", "n": 8, "k": 2, "share": "ring:3", "layers": [0, 1, 3]}, 3 * 64 * 8),
    ({"type": "ultramem-v2", "n": 8, "k": 2, "share": "ring:2", "heads": 2, "layers": [0, 1, 2, 3]}, 4 * 64 * 8),
]


def counts_of(name: str) -> dict[str, int]:
    return count_parameters(json.loads((MODELS / f"{name}.json").read_text()))


def parts_of(counts: dict[str, int]) -> tuple[int, int, int]:
    return counts["backbone"], counts["memory_values"], counts["memory_rest"]


def numbers_of(config: Any) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


def test_moc_models_have_the_papers_parameters():
    """Appendix A.4.1: 371.29M = 147.87M + 201.38M + 22.04M, and 202.94M of the deeper model without memory."""
    assert parts_of(counts_of("moc-371m")) == (147_874_560, 201_375_744, 22_042_628)
    assert counts_of("moc-371m")["total"] == 371_292_932
    assert parts_of(counts_of("vanilla-148m")) == (147_874_560, 0, 0)
    assert parts_of(counts_of("vanilla-203m")) == (202_937_088, 0, 0)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_family_parameters_equal_the_models(native_family, changes):
    config = NATIVE_FAMILIES[native_family].config(**changes)
    counts = count_parameters(config.to_dict())
    assert parts_of(counts) == (numbers_of(config), 0, 0) and counts["activated"] == counts["total"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    assert counts["total"] - counts["total_without_embeddings"] == sum(weight.numel() for weight in embeddings)


@pytest.mark.parametrize(("memory", "values"), MEMORIES, ids=str)
def test_memory_parameters_equal_the_models(native_family, memory, values):
    native = NATIVE_FAMILIES[native_family].config().to_dict()
    model_type = f"midus_{native.pop('model_type')}"
    config = {**native, "memory": [memory]}
    counts = count_parameters({**config, "model_type": model_type})
    assert counts["total"] == numbers_of(AutoConfig.for_model(model_type, **config))
    assert counts["memory_values"] == values


@pytest.mark.parametrize(
    ("memory", "read"),
    [
        ({"type": "midus-hml", "n": 4, "k": 3, "layers": [1]}, 4 * 3 * 8),
        ({"type": "midus-pkm", "n": 4, "k": 3, "layers": [1]}, 4 * 3 * 32),
        ({"type": "ultramem-v2", "n": 8, "k": 5, "heads": 2, "share": "ring:2", "layers": [0, 1, 2]}, 3 * 2 * 5 * (6 + 2)),
        ({"type": "ultramem-v2", "n": 8, "k": 5, "pre_value_width": 0, "value_width": 7, "layers": [0]}, 5 * 7),
        ({"type": "moc", "memory_tokens": 64, "chapters": 8, "k": 2, "layers": [1, 2]}, 2 * 3 * 8 * 32),
        # The first two layers read at most the whole bank, the third 6 of 8 chapters of another.
        ({"type": "moc", "memory_tokens": 64, "chapters": 8, "k": 5, "share": "every:2", "layers": [0, 1, 2]}, (8 + 6) * 256),
    ],
    ids=str,
)  # fmt: skip
def test_token_activates_all_but_unread_values(memory, read):
    native = NATIVE_FAMILIES["llama"].config().to_dict()
    counts = count_parameters({**native, "model_type": "midus_llama", "memory": [memory]})
    assert read < counts["memory_values"]
    assert counts["activated"] == counts["total"] - counts["memory_values"] + read


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_missing_config_keys_have_class_defaults(family):
    full = NATIVE_FAMILIES[family].config_class().to_dict()
    sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size model_type".split()
    assert estimate_flops({key: full[key] for key in sizes}, 8) == estimate_flops(full, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2'; expected one of: llama, qwen2, .*, or midus_ and one of them"),
        ({"hidden_size": None}, "hidden_size = None; expected a positive integer"),
        ({"vocab_size": "many"}, "vocab_size = 'many'; expected a positive integer"),
    ],
)
def test_uncountable_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        estimate_flops({**NATIVE_FAMILIES["llama"].config().to_dict(), **changes}, 8)


def test_unproven_plugin_family_is_refused():
    class AlpacaConfig(LlamaConfig):
        model_type = "alpaca"

    class AlpacaForCausalLM(LlamaForCausalLM):
        config_class = AlpacaConfig

    AutoConfig.register("alpaca", AlpacaConfig)
    AutoModelForCausalLM.register(AlpacaConfig, AlpacaForCausalLM)
    config = NATIVE_FAMILIES["llama"].config(attention_bias=True).to_dict()
    try:
        with pytest.raises(ValueError, match=r"'alpaca' is not among .* python -m scripts\.anatomy alpaca$"):
            count_parameters({**config, "model_type": "alpaca"})
    finally:
        del CONFIG_MAPPING._extra_content["alpaca"]
        del AutoModelForCausalLM._model_mapping._extra_content[AlpacaConfig]
