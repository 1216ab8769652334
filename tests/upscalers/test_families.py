"""What is read of a model from config.json alone: names, shapes and roles of tensors, and implied layer types."""

from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from midus_hf.config.backbone import PROVEN
from upscalers.architecture.families import family_of
from upscalers.architecture.layout import layout_of
from upscalers.request.errors import RequestError

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
# Keys that decide names, shapes or types in some family; null and absent may mean different things.
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
    """The same from `layout.py`."""
    family_of(config)
    layout = layout_of(config)
    tensors = dict(layout.outer)
    for layer, of_layer in enumerate(layout.layers):
        for name, tensor in of_layer.items():
            tensors[f"model.layers.{layer}.{name}"] = tensor.shape
    return tensors, layout.layer_types


CONFIGS = st.fixed_dictionaries(
    {**{key: st.just(size) for key, size in SIZES.items()}, "num_hidden_layers": st.sampled_from([3, 4, 31])},
    optional={key: st.sampled_from(values) for key, values in CHOICES.items()},
)


@pytest.mark.parametrize("model_type", sorted(PROVEN))
@settings(max_examples=12)
@example({**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16})
@example(SIZES)
@given(CONFIGS)
def test_whatever_a_config_says_it_implies_what_transformers_implies(model_type, config):
    config = {"model_type": model_type, **config}
    real = by_transformers(config)
    assume(real is not None)
    assert by_layout(config) == real


def test_a_type_is_read_as_no_other_type():
    """SmolLM3 named `llama` loads, is verified, and is wrong: some of its layers have no rotary embeddings."""
    for model_type in ("smollm3", "llama4_text", "gemma", "ministral", "olmo3", "mixtral", "qwen3_moe"):
        family = family_of({"model_type": model_type})
        assert family.model_type == model_type and model_type not in PROVEN
        assert family_of({"model_type": f"midus_{model_type}"}) == family


# What a config says beside the usual sizes, of Gemma 3 unless another type is named; `...` is left out.
REFUSED = [
    ({"model_type": ...}, "config.json has model_type = None; expected one of: llama, qwen2, qwen3, gemma2, gemma3_text"),
    ({"model_type": ["llama"]}, r"config.json has model_type = \['llama'\]"),
    ({"model_type": "bert"}, "model_type 'bert' is not supported: 'bert' is an encoder, whose tokens read later tokens"),
    (
        {"model_type": "gemma3"},
        "model_type 'gemma3' is not supported: 'gemma3' holds a language model within a composite model; expected",
    ),
    (
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
        r"the base is quantised \(quantization_config: gptq\); expected float32, float16 or bfloat16 weights",
    ),
    ({"model_type": "mixtral", "quantization_config": {"quant_method": "mxfp4"}}, r"quantised \(quantization_config: mxfp4\)"),
    ({"model_type": "mixtral", "num_attention_heads": "four"}, "config has num_attention_heads = 'four'; expected a positive"),
    ({"model_type": "llama", "quantization_config": 8}, r"the base is quantised \(quantization_config: unknown\)"),
    ({"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}, "the base brings code of its own"),
    ({"hidden_size": "32"}, "hidden_size = '32'; expected a positive integer"),
    ({"hidden_size": True}, "hidden_size = True; expected a positive integer"),
    ({"num_key_value_heads": 2.0}, "num_key_value_heads = 2.0; expected a positive integer"),
    ({"vocab_size": 0}, "vocab_size = 0; expected a positive integer"),
    ({"layer_types": "full_attention"}, "layer_types = 'full_attention'; expected a list of names, one per layer"),
    ({"layer_types": [1, 2]}, r"layer_types = \[1, 2\]; expected a list of names"),
    ({"sliding_window_pattern": 0}, r"cannot build the model that config.json describes .ZeroDivisionError"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_config_that_says_nothing_known_or_a_wrong_value_is_refused(changes, message):
    config = {"model_type": "gemma3_text", **SIZES, **changes}
    with pytest.raises(RequestError, match=message):
        by_layout({key: value for key, value in config.items() if value is not ...})
