"""Read from a raw `config.json` what counting needs of the backbone: its sizes and the traits of its family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from midus_hf.config.model_sizes import ModelSizes, activation_of

Config = Mapping[str, Any]

MEMORY_PREFIX = "midus_"


@dataclass(frozen=True, kw_only=True)
class FamilyTraits:
    """Differences between a family and Llama.

    Args:
        defaults: Values of config keys that a config leaves out. Without a default, the activation is `silu` and biases
            are off.
        bias_keys: Config keys that give biases to projections. A family ignores the keys that are not listed.
        qkv_bias: Whether queries, keys and values have biases whatever the config says.
        query_key_norm: `"head"` if queries and keys are normalised per head, `"whole"` if over all heads together.
            Default: None, they are not normalised.
        input_norms: Whether a norm precedes attention and the feed-forward network.
        output_norms: Whether a norm follows attention and the feed-forward network.
        unit_offset_norms: Whether norms multiply by 1 + weight instead of the weight.
        scales_embedding: Whether embeddings are multiplied by a number.
    """

    defaults: Config = field(default_factory=dict)
    bias_keys: frozenset[str] = frozenset({"attention_bias"})
    qkv_bias: bool = False
    query_key_norm: Literal["head", "whole"] | None = None
    input_norms: bool = True
    output_norms: bool = False
    unit_offset_norms: bool = False
    scales_embedding: bool = False


_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}

# Traits by `model_type`, for every family that can be upscaled. `upscalers.architecture.families` adds the families of
# other packages.
FAMILY_TRAITS: dict[str, FamilyTraits] = {
    "llama": FamilyTraits(bias_keys=frozenset({"attention_bias", "mlp_bias"})),
    "qwen2": FamilyTraits(defaults={"num_key_value_heads": 32}, bias_keys=frozenset(), qkv_bias=True),
    "qwen3": FamilyTraits(defaults={"num_key_value_heads": 32, "head_dim": 128}, query_key_norm="head"),
    "gemma2": FamilyTraits(
        defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        output_norms=True,
        unit_offset_norms=True,
        scales_embedding=True,
    ),
    "gemma3_text": FamilyTraits(
        defaults=_GEMMA,
        query_key_norm="head",
        output_norms=True,
        unit_offset_norms=True,
        scales_embedding=True,
    ),
    "mistral": FamilyTraits(defaults={"num_key_value_heads": 8}, bias_keys=frozenset()),
    "olmo2": FamilyTraits(query_key_norm="whole", input_norms=False, output_norms=True),
}


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A decoder without its memories.

    Args:
        sizes: Sizes that memories are built for.
        vocabulary: V, the number of tokens in the vocabulary.
        traits: Traits of the family.
        attention_bias: Whether queries, keys and values have biases.
        output_bias: Whether the output projection of attention has a bias.
        mlp_bias: Whether the feed-forward network has biases.
        caps_scores: Whether a tanh caps attention scores softly.
        caps_logits: Whether a tanh caps logits softly.
        tied: Whether the language head and the embedding share one matrix.
    """

    sizes: ModelSizes
    vocabulary: int
    traits: FamilyTraits
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    caps_scores: bool
    caps_logits: bool
    tied: bool


def read_backbone(config: Config) -> Backbone:
    """Read the backbone of a config. A key that the config leaves out has the family's default.

    Raises:
        ValueError: If the family is unknown, or if a size is missing or not a positive integer.
    """
    model_type = config.get("model_type")
    traits = FAMILY_TRAITS.get(model_type.removeprefix(MEMORY_PREFIX)) if isinstance(model_type, str) else None
    if traits is None:
        raise ValueError(
            f"config has model_type = {model_type!r}; expected one of: {', '.join(FAMILY_TRAITS)}, or {MEMORY_PREFIX} and one of "
            "them."
        )
    values = {**traits.defaults, **config}

    def size(key: str, default: int | None = None) -> int:
        value = default if values.get(key) is None else values[key]
        if type(value) is not int or value < 1:
            raise ValueError(f"config has {key} = {value!r}; expected a positive integer.")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    has_bias = {key: key in traits.bias_keys and bool(values.get(key)) for key in ("attention_bias", "mlp_bias")}
    return Backbone(
        sizes=ModelSizes(
            hidden_size=hidden,
            num_heads=heads,
            head_dim=size("head_dim", hidden // heads),
            num_key_value_heads=size("num_key_value_heads", heads),
            intermediate_size=size("intermediate_size"),
            num_layers=size("num_hidden_layers"),
            activation=activation_of(values),
        ),
        vocabulary=size("vocab_size"),
        traits=traits,
        attention_bias=has_bias["attention_bias"] or traits.qkv_bias,
        output_bias=has_bias["attention_bias"],
        mlp_bias=has_bias["mlp_bias"],
        caps_scores=bool(values.get("attn_logit_softcapping")),
        caps_logits=bool(values.get("final_logit_softcapping")),
        tied=bool(values.get("tie_word_embeddings")),
    )
