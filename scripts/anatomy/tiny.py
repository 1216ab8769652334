"""Tiny random models of any type that transformers knows, on which architectures are read and proven."""

import copy
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from midus_hf.anatomy.types import UnknownType
from midus_hf.models.families.template import COMPOSITE_MAPPINGS

# Names that config classes have for the sizes of a tiny model. A type ignores the names that its config lacks, and
# of two names for one value the later counts.
_NAMES: dict[float, str] = {
    1: "n_group topk_group first_k_dense_replace bos_token_id mamba_n_groups mamba_ngroups n_groups num_global_key_value_heads",
    4: "num_hidden_layers num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "linear_num_value_heads linear_num_heads adapter_rank",
    2: "num_key_value_heads num_experts_per_tok eos_token_id linear_num_key_heads zero_expert_num moe_topk",
    8: "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
    "mamba_n_heads mamba_d_head mamba_d_state mamba_num_heads mamba_head_dim ssm_state_size n_mamba_heads "
    "hidden_size_per_layer_input",
    16: "qk_head_dim q_lora_rank kv_lora_rank sliding_window global_head_dim router_hidden_size",
    32: "hidden_size encoder_hash_byte_group_vocab",
    48: "intermediate_size intermediate_size_mlp ffn_hidden_size",
    24: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_experts_intermediate_size expert_ffn_hidden_size",
    64: "mamba_d_ssm",
    96: "vocab_size unpadded_vocab_size vocab_size_per_layer_input",
    128: "max_position_embeddings",
}
_SMALL: dict[str, float] = {name: size for size, names in _NAMES.items() for name in names.split()} | {
    "pad_token_id": 0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.4,
    "embedding_multiplier": 1.5,
    "logits_scaling": 2.0,
}

_HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# Values that single types need in addition, so that a tiny model exists and has each kind of layer.
_SMALL_OF_TYPE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": _HYBRID, "num_key_value_heads": 4, "num_mtp_layers": 0},
    "bamba": {"attn_layer_indices": [3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}, "ffn_config": {"ffn_hidden_size": 48}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "num_key_value_heads": 4, "head_dim": 16, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8, "swa_head_dim": 16,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "mamba", "attention"]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 3},
    "kimi_linear": {"layer_types": _HYBRID, "num_key_value_heads": 4},
    "lfm2": {"full_attn_idxs": [3]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"num_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "moshi": {"ffn_dim": 96},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2,
        "hc_lowrank": 8, "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0},
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Return a config of a model type with small sizes.

    Args:
        model_type: The `model_type` of a causal language model of transformers.
        changes: Values of the config that replace the small ones.

    Raises:
        UnknownType: If the config class refuses the small sizes.
    """
    try:
        return CONFIG_MAPPING[model_type](**{**small_sizes(model_type), **changes})
    except Exception as error:  # config classes raise whatever their checks raise
        raise UnknownType(
            f"{model_type!r} has no tiny config ({type(error).__name__}: {error}). Add the sizes that it needs to _SMALL_OF_TYPE in "
            "scripts/anatomy/tiny.py."
        ) from None


def small_sizes(model_type: str) -> dict[str, Any]:
    """Return the values of a type's tiny config, by key."""
    return {**_small(CONFIG_MAPPING[model_type]()), **_SMALL_OF_TYPE.get(model_type, {})}


def tiny_model(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a tiny random model of a type, in float32 and in eval mode, and leave the caller's random numbers as they were.

    Args:
        model_type: The `model_type` of a causal language model of transformers.
        seed: Seed of the weights. Default: 0.
        changes: Values of the config that replace the small ones.

    Raises:
        UnknownType: If transformers cannot build the model.
    """
    config = tiny_config(model_type, **changes)
    return _drawn(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, seed)


def tiny_composite_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Return a tiny random model that holds a language model, such as one that reads images, in float32 and in eval mode.

    Args:
        model_type: The `model_type` of a config with a `text_config`.
        seed: Seed of the weights. Default: 0.

    Raises:
        UnknownType: If transformers has no class for the type, or cannot build the model.
    """
    config_class = CONFIG_MAPPING[model_type]
    composite = composite_class_of(config_class)
    try:
        config = config_class(**small_composite_sizes(model_type))
    except Exception as error:  # config classes raise whatever their checks raise
        raise UnknownType(f"{model_type!r} has no tiny config ({type(error).__name__}: {error}).") from None
    return _drawn(composite, config, seed)


def small_composite_sizes(model_type: str) -> dict[str, Any]:
    """Return the values of a composite type's tiny config, by key."""
    default = CONFIG_MAPPING[model_type]()
    language_config = default.get_text_config(decoder=True)
    small = _small(default)
    name = next(name for name, value in vars(default).items() if value is language_config)
    language_type = language_config.model_type
    small[name] |= {**_SMALL_OF_TYPE.get(language_type, {}), "model_type": language_type}
    return small


def composite_class_of(config_class: Any) -> Any:
    """Return the class of the models that hold a language model within a composite one, for a class of configs.

    Raises:
        UnknownType: If transformers has none.
    """
    for mapping in COMPOSITE_MAPPINGS:
        if config_class in mapping:
            return mapping[config_class]
    raise UnknownType(
        f"{config_class.model_type!r} has no class of models for text and images or sounds in this version of transformers."
    )


def _drawn(model_class: Any, config: Any, seed: int) -> PreTrainedModel:
    """Return a random model of a small config."""
    model_type = config.model_type
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        try:
            with torch.device("meta"):
                size = sum(tensor.numel() for tensor in model_class(copy.deepcopy(config)).parameters())
            if size > _MOST_PARAMETERS:
                raise ValueError(f"it has {size:,} parameters")
            model = model_class._from_config(config, dtype=torch.float32).eval()
        except Exception as error:  # models raise whatever their parts raise
            raise UnknownType(
                f"a tiny model of {model_type!r} cannot be built ({type(error).__name__}: {error}). Add the sizes that it needs to "
                "_SMALL_OF_TYPE in scripts/anatomy/tiny.py."
            ) from None
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms and biases, which start where they change nothing
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _small(config: PreTrainedConfig) -> dict[str, Any]:
    """Return small values for the sizes of a config, and for the sizes of configs within it."""
    values = vars(config)
    small = {}
    for name, size in _SMALL.items():
        name = config.attribute_map.get(name, name)
        if name in values and _is_size(name, values[name]):
            small[name] = size
    if "kv_lora_rank" in small:  # latent attention has a key and a value per query head
        small["num_key_value_heads"] = small["num_attention_heads"]
    nested = {name: _small(value) for name, value in values.items() if isinstance(value, PreTrainedConfig)}
    return small | nested


def _is_size(name: str, default: Any) -> bool:
    return type(default) in (int, float) or (name == "head_dim" and default is None)


# A model beyond this number of parameters is not tiny.
_MOST_PARAMETERS = 20_000_000
