"""What is read from config.json: names, shapes and roles of tensors, types of layers."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from midus_hf.anatomy.types import MAIN_TYPES, model_type_of
from scripts.anatomy.layouts import written_layout
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B
from upscalers.architecture.built_layout import read_layout
from upscalers.architecture.layer_tensors import family_of
from upscalers.architecture.layout import find_changed_setting, known_layout, layout_from, layout_of

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3}
SIZES["num_attention_heads"] = 4
# Keys that decide names, shapes or types in some family; null and absent may mean different things.
CHOICES: dict[str, list[Any]] = {
    **{key: [True, False] for key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")},
    "num_key_value_heads": [1, 2, 4, None], "head_dim": [8, 16, None], "sliding_window": [4, None], "max_window_layers": [0, 1, 5],
    "sliding_window_pattern": [1, 2, 3], "_sliding_window_pattern": [2], "layer_types": [None], "num_hidden_layers": [4, 31],
}  # fmt: skip
FURTHER: dict[str, list[Any]] = {
    "layer_types": [None, ["full_attention", "sliding_attention", "full_attention"]],
    "rope_parameters": [{"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}, {"full_attention": {"rope_theta": 1e6}}],
    "rope_scaling": [
        {"type": "linear", "factor": 2},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}],
    "pad_token_id": [31, 32, -1],
    "dtype": ["bfloat16", "other"],
    "hidden_act": ["gelu", "other"],
    "use_bidirectional_attention": [True],
    "foreign": [[0, 1, 2], {"a": 1}],
}  # fmt: skip


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


def by_layout(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], list[str] | None]:
    family_of(config)
    layout = layout_of(config)
    layers = [{f"model.layers.{i}.{n}": t.shape for n, t in layer.items()} for i, layer in enumerate(layout.layers)]
    return {**layout.outer, **{name: shape for layer in layers for name, shape in layer.items()}}, layout.layer_types


CONFIGS = st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in CHOICES.items()}).map(
    lambda config: {**SIZES, **config}
)
# A few of all values, which are often all written down.
SAID = [(key, value) for key, values in [*CHOICES.items(), *FURTHER.items()] for value in values]
USUAL = st.lists(st.sampled_from(SAID), max_size=5).map(lambda said: {**SIZES, "num_key_value_heads": 2, **dict(said)})
LARGE = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
LARGE |= dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), True)


@pytest.mark.parametrize("model_type", sorted(MAIN_TYPES))
@settings(max_examples=12)
@example(LARGE)
@example(SIZES)
@given(CONFIGS)
def test_layout_equals_that_of_transformers(model_type, config):
    config = {"model_type": model_type, **config}
    real = by_transformers(config)
    assume(real is not None)
    assert by_layout(config) == real


@pytest.mark.parametrize("model_type", MAIN_TYPES)
@settings(max_examples=10, suppress_health_check=[HealthCheck.filter_too_much])
@example(LARGE)
@example({**LARGE, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False})
@example({**LARGE, "num_hidden_layers": 31, "use_sliding_window": True, "sliding_window": 4})
@given(USUAL)
def test_known_layout_equals_the_built_one(model_type, config):
    config = {"model_type": model_type, **config}
    is_written = known_layout(config) is not None
    assert is_written or config != {"model_type": model_type, **LARGE}
    assume(is_written)
    layout = layout_of(config)
    read = layout_from(config, **read_layout(config, model_type_of(model_type)))  # refuses what transformers refuses
    assert replace(layout, settings=(), values={}) == replace(read, settings=(), values={})
    assert [[*tensors] for tensors in layout.layers] == [[*tensors] for tensors in read.layers]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        assert layout.values.get(key) == read.values.get(key)
    # Layers that are written down alike compute alike, wherever they stand.
    sources = [layout.settings.index(of_layer) for of_layer in layout.settings]
    assert find_changed_setting(read.settings, read.settings, sources) is None


def test_known_layouts_are_what_the_command_writes():
    for model_type in MAIN_TYPES:
        row = model_type_of(model_type)
        assert row.layout == json.loads(json.dumps(written_layout(row)))


GEMMA_3 = {**SIZES, "model_type": "gemma3_text"}
OF_TRANSFORMERS = {
    "a type without a row": {"model_type": "mixtral"},
    "null where a number is expected": {"num_key_value_heads": None, "model_type": "gemma2"},
    "null that only code reads": {"head_dim": None, "model_type": "qwen2"},
    "a number of another kind": {"rms_norm_eps": 1},
    "a list as long as the layers": {"foreign": [0, 1, 2]},
    "shared keys and values": {"num_kv_shared_layers": 1},
    "layers with rotary embeddings": {"no_rope_layers": [1, 1, 0]},
    "types of other layers": {"layer_types": ["full_attention"] * 4},
    "an unknown activation": {"hidden_act": "other"},
    "rotary embeddings without a factor": {"rope_scaling": {"rope_type": "yarn"}},
    "unknown rotary embeddings": {"rope_scaling": {"rope_type": "other"}},
    "rotary embeddings for each type": {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "rotary embeddings for none": {**GEMMA_3, "rope_parameters": {"rope_type": "default"}},
    "rotary embeddings in no mapping": {"rope_scaling": 2},
    "a base in words": {"rope_theta": "large"},
    "both directions": {**GEMMA_3, "use_bidirectional_attention": True},
    "no period": {**GEMMA_3, "sliding_window_pattern": None},
    "padding outside the vocabulary": {"pad_token_id": 32},
    "an unknown dtype": {"dtype": "other"},
    "odd heads": {"head_dim": 7},
    "heads that do not divide the width": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "heads in unequal groups": {"num_key_value_heads": 3},
    "starts that are no share": {"initializer_range": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("changes", OF_TRANSFORMERS.values(), ids=OF_TRANSFORMERS)
def test_unusual_configs_are_left_to_transformers(changes):
    assert known_layout({**SIZES, "model_type": "llama", **changes}) is None


@pytest.mark.parametrize("config", [LLAMA_3_2_1B, LLAMA_3_1_8B])
def test_published_configs_have_known_layouts(config):
    further = {"bos_token_id": 128000, "eos_token_id": [128001, 128008], "transformers_version": "4.45.0"}
    assert known_layout({**config, **further}) is not None


def test_type_is_never_read_as_another():
    """SmolLM3 named `llama` would load and be wrong: some of its layers do not rotate."""
    for model_type in ("smollm3", "llama4_text", "gemma", "ministral", "olmo3", "mixtral", "qwen3_moe"):
        family = family_of({"model_type": model_type})
        assert family.model_type == model_type
        assert model_type not in MAIN_TYPES
        assert family_of({"model_type": f"midus_{model_type}"}) == family


# What a config says in addition to the usual sizes, of Gemma 3 unless another type is named; `...` is left out.
REFUSED = [
    ({"model_type": ...}, "config.json has model_type = None; expected one of: llama, qwen2, qwen3, gemma2, gemma3_text"),
    ({"model_type": ["llama"]}, r"config.json has model_type = \['llama'\]"),
    ({"model_type": "bert"}, "'bert' is an encoder, whose tokens read later tokens"),
    ({"model_type": "gemma3"}, "'gemma3' is a composite model; expected its language model, 'gemma3_text'"),
    *(
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": method}}, rf"{method}\); expected float32.*{remedy}")
        for method, remedy in (("gptq", "Start from"), ("fp8", r"=FineGrainedFP8Config\("), ("mxfp4", r"=Mxfp4Config\("))
    ),
    ({"model_type": "llama", "quantization_config": 8}, r"the base is quantised \(quantization_config: unknown\)"),
    ({"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}, "the base has custom code"),
    ({"model_type": "mixtral", "num_attention_heads": "four"}, "num_attention_heads = 'four'; expected a positive"),
    *(
        ({key: value}, f"{key} = {value!r}; expected a positive integer")
        for key, value in (("hidden_size", "32"), ("hidden_size", True), ("num_key_value_heads", 2.0), ("vocab_size", 0))
    ),
    ({"layer_types": "full_attention"}, "layer_types = 'full_attention'; expected a list of names, one per layer"),
    ({"layer_types": [1, 2]}, r"layer_types = \[1, 2\]; expected a list of names"),
    ({"sliding_window_pattern": 0}, r"cannot build the model that config.json describes .ZeroDivisionError"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_wrong_config_is_refused(changes, message):
    config = {"model_type": "gemma3_text", **SIZES, **changes}
    with pytest.raises(ValueError, match=message):
        by_layout({key: value for key, value in config.items() if value is not ...})
