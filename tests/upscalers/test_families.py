"""The family table against transformers: names and shapes of tensors, and implied layer types, from config.json alone."""

import random
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tiny import FAMILIES as TINY
from transformers import AutoConfig, AutoModelForCausalLM

from midus_hf.memory.headwise import HeadwiseMemory
from upscalers.engine.errors import RequestError
from upscalers.engine.families import ATTENTION_ROLES, FAMILIES, family_of
from upscalers.engine.memory_shapes import memory_by_layer, memory_shapes

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
CHOICES: dict[str, list[Any]] = {
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "tie_word_embeddings": [True, False],
    "num_key_value_heads": [1, 2, 4, None],
    "head_dim": [8, 16, None],
    "use_sliding_window": [True, False],
    "sliding_window": [4, None],
    "max_window_layers": [0, 1, 5],
    "sliding_window_pattern": [1, 2, 3],
    "_sliding_window_pattern": [2],
    "layer_types": [None],
}
"""Keys that decide names, shapes or types in some family; null and absent may mean different things."""


@pytest.fixture(params=FAMILIES)
def model_type(request) -> str:
    """Each row of the table in turn."""
    return request.param


def by_transformers(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], list[str] | None] | None:
    """Tensors of the real model and the types of its layers; None where transformers refuses the config."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        real = AutoConfig.for_model(config["model_type"], **fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(real)
    except (StrictDataclassError, ValueError, TypeError):
        return None
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if real.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors, getattr(real, "layer_types", None)


def by_the_table(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], list[str] | None]:
    """The same from `families.py`."""
    family = family_of(config)
    tensors = dict(family.outer_tensors(config))
    for layer in range(config["num_hidden_layers"]):
        for name, tensor in family.layer_tensors(config).items():
            tensors[f"model.layers.{layer}.{name}"] = tensor.shape
    return tensors, family.resolved_layer_types(config)


def test_a_minimal_config_implies_what_transformers_implies(model_type):
    config = {"model_type": model_type, **SIZES}
    assert by_the_table(config) == by_transformers(config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_biases_and_tied_heads_are_those_of_the_real_class(model_type, biased, tied):
    config = {
        "model_type": model_type,
        **SIZES,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "attention_bias": biased,
        "mlp_bias": biased,
        "tie_word_embeddings": tied,
    }
    tensors, _ = by_the_table(config)
    assert (tensors, _) == by_transformers(config)
    assert ("lm_head.weight" in tensors) != tied


def test_random_configs_imply_what_transformers_implies(model_type):
    rng = random.Random(model_type)
    compared = 0
    while compared < 60:
        chosen = {key: rng.choice(values) for key, values in CHOICES.items() if rng.random() < 0.4}
        config = {"model_type": model_type, **SIZES, **chosen}
        real = by_transformers(config)
        if real is not None:
            assert by_the_table(config) == real, chosen
            compared += 1


def test_layer_types_of_a_deep_model_are_those_of_transformers(model_type):
    config = {"model_type": model_type, **SIZES, "num_hidden_layers": 31, "use_sliding_window": True}
    assert by_the_table(config)[1] == by_transformers(config)[1]


def test_the_saved_config_of_a_tiny_model_gives_its_state_dict(family):
    config = TINY[family].config().to_dict()
    assert by_the_table(config) == by_transformers(config)


def test_the_norm_in_front_of_attention_and_the_one_behind_it_are_told_apart():
    roles = {
        model_type: {name: tensor.role for name, tensor in family.layer_tensors({**SIZES, "head_dim": 8}).items()}
        for model_type, family in FAMILIES.items()
    }
    for model_type in ("llama", "qwen2", "qwen3", "mistral"):
        assert roles[model_type]["post_attention_layernorm.weight"] == "mlp_norm"
    for model_type in ("gemma2", "gemma3_text"):
        assert roles[model_type]["post_attention_layernorm.weight"] == "attention_output_norm"
        assert roles[model_type]["pre_feedforward_layernorm.weight"] == "mlp_norm"
    olmo2 = roles.pop("olmo2")
    assert {role for role in olmo2.values() if role.endswith("norm")} == {
        "query_norm",
        "key_norm",
        "attention_output_norm",
        "mlp_output_norm",
    }
    assert all(names["input_layernorm.weight"] == "attention_norm" for names in roles.values())


def test_a_block_keeps_attention_without_its_output_projection_and_the_norm_in_front(model_type):
    config = {**SIZES, "attention_bias": True}
    kept = {n for n, t in FAMILIES[model_type].layer_tensors(config).items() if t.role in ATTENTION_ROLES}
    projections = {f"self_attn.{name}_proj.weight" for name in "qkv"}
    norms = {"input_layernorm.weight"} if FAMILIES[model_type].input_norms else set()
    assert projections | norms <= kept
    assert not any("o_proj" in name or "mlp" in name or "feedforward" in name for name in kept)
    assert "post_attention_layernorm.weight" not in kept


@pytest.mark.parametrize("n", [1, 5])
def test_memory_shapes_are_those_of_the_module(family, n):
    config = TINY[family].config()
    entry = {"type": "headwise", "n": n, "k": 1}
    planned = memory_shapes(family_of(config.to_dict()), config.to_dict(), entry)
    memory = HeadwiseMemory(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        n=n,
        k=1,
    )
    real = {f"memory.{name}": tuple(parameter.shape) for name, parameter in memory.named_parameters()}
    assert planned == real


def test_memory_has_the_modules_default_size_where_the_entry_says_nothing():
    shapes = memory_shapes(FAMILIES["llama"], SIZES, {"type": "headwise", "layers": [0]})
    assert shapes["memory.value_bank"] == (64 * 64, 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.json has model_type = None; expected one of: llama, qwen2, qwen3, gemma2, gemma3_text"),
        ({"model_type": ["llama"]}, r"config.json has model_type = \['llama'\]"),
        ({"model_type": "lama"}, "model_type 'lama' is not supported. Did you mean 'llama'"),
        ({"model_type": "bert"}, "model_type 'bert' is not supported. Expected one of: llama"),
        ({"model_type": "gemma3"}, "model_type is 'gemma3', which reads images as well; expected the text model, 'gemma3_text'"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
            r"the base is quantised \(quantization_config: gptq\); expected float32, float16 or bfloat16 weights",
        ),
        ({"model_type": "llama", "quantization_config": 8}, r"the base is quantised \(quantization_config: unknown\)"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}, "the base brings code of its own"),
        ({"model_type": "mixtral"}, r"the base is a mixture of experts \(mixtral\)"),
        ({"model_type": "qwen3_moe"}, r"the base is a mixture of experts \(qwen3_moe\)"),
        ({"model_type": "llama", "num_local_experts": 8}, r"the base is a mixture of experts \(llama\); expected a dense model"),
        ({"model_type": "llama", "num_kv_shared_layers": 2}, r"shares keys and values between layers \(num_kv_shared_layers = 2\)"),
    ],
)  # fmt: skip
def test_a_base_of_no_known_family_is_refused(config, message):
    with pytest.raises(RequestError, match=message):
        family_of(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size = '32'; expected a positive integer"),
        ({"hidden_size": True}, "hidden_size = True; expected a positive integer"),
        ({"num_attention_heads": None}, "num_attention_heads = None; expected a positive integer"),
        ({"num_key_value_heads": 2.0}, "num_key_value_heads = 2.0; expected a positive integer"),
        ({"head_dim": -8}, "head_dim = -8; expected a positive integer"),
        ({"vocab_size": 0}, "vocab_size = 0; expected a positive integer"),
        ({"intermediate_size": []}, r"intermediate_size = \[\]; expected a positive integer"),
        ({"layer_types": "full_attention"}, "layer_types = 'full_attention'; expected a list of names, one a layer"),
        ({"layer_types": [1, 2]}, r"layer_types = \[1, 2\]; expected a list of names"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(changes, message):
    config = {"model_type": "gemma3_text", **SIZES, **changes}
    with pytest.raises(RequestError, match=message):
        by_the_table(config)


def test_what_decides_implied_layer_types_must_be_whole_numbers():
    with pytest.raises(RequestError, match="max_window_layers = 'x'; expected an integer"):
        by_the_table({"model_type": "qwen2", **SIZES, "use_sliding_window": True, "max_window_layers": "x"})
    with pytest.raises(RequestError, match="sliding_window_pattern = 0; expected a positive integer"):
        by_the_table({"model_type": "gemma3_text", **SIZES, "sliding_window_pattern": 0})


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"type": "headwise"}, "memory = {'type': 'headwise'}; expected a list of entries"),
        ([5], "the memory entry 5; expected an object with 'layers' and a 'type' out of: headwise"),
        ([{"type": "headwise"}], "the memory entry {'type': 'headwise'}"),
        ([{"type": "headwise", "layers": [True]}], "the memory entry"),
        ([{"type": "hedwise", "layers": [0]}], "the memory entry {'type': 'hedwise'"),
    ],
)
def test_a_malformed_memory_entry_is_refused(memory, message):
    with pytest.raises(RequestError, match=message):
        memory_by_layer({"memory": memory})


def test_a_memory_of_unknown_type_or_no_size_has_no_shapes():
    with pytest.raises(RequestError, match=r"memory type 'headwize' is unknown\. Did you mean 'headwise'"):
        memory_shapes(FAMILIES["llama"], SIZES, {"type": "headwize"})
    with pytest.raises(RequestError, match="a headwise memory of n = 0; expected a positive integer"):
        memory_shapes(FAMILIES["llama"], SIZES, {"type": "headwise", "n": 0})
