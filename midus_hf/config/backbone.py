"""What a raw `config.json` says of its backbone: the sizes, and what is peculiar to the family, as far as counting needs them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from midus_hf.config.model_sizes import ModelSizes, activation_of

Config = Mapping[str, Any]

MEMORY_PREFIX = "midus_"


@dataclass(frozen=True, kw_only=True)
class FamilyTraits:
    """What sets a family apart from Llama.

    Args:
        defaults: What absent config values mean, `silu` and no biases aside.
        bias_keys: The config keys that give biases to projections; other families ignore the same keys.
        qkv_bias: Whether queries, keys and values have biases whatever the config says.
        query_key_norm: Whether queries and keys are normalised: a head at a time, or all heads together (`"whole"`).
        input_norms: Whether a norm stands in front of attention and feed-forward network.
        output_norms: Whether a norm follows attention and feed-forward network.
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
"""By `model_type`. Every family that can be upscaled is here; `upscalers.architecture.families` enters those of other packages."""


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A decoder without its memories.

    Args:
        sizes: As memories are built for.
        vocabulary: V, tokens that there are.
        traits: Of its family.
        attention_bias: Whether queries, keys and values have biases.
        output_bias: Whether the output projection of attention has one.
        mlp_bias: Whether the feed-forward network has biases.
        activation: Of the feed-forward network, which is gated.
        caps_scores: Whether attention scores are capped softly, by a tanh.
        caps_logits: Whether logits are.
        tied: Whether the language head is the embedding.
    """

    sizes: ModelSizes
    vocabulary: int
    traits: FamilyTraits
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    activation: str
    caps_scores: bool
    caps_logits: bool
    tied: bool

    @property
    def query_width(self) -> int:
        """H * d, of all query heads together."""
        return self.sizes.num_heads * self.sizes.head_dim

    @property
    def key_width(self) -> int:
        """Of all key heads together, and of all value heads."""
        return self.sizes.num_key_value_heads * self.sizes.head_dim


def read_backbone(config: Config) -> Backbone:
    """Read the backbone of a config, with the family's default where the config does not have a key.

    Raises:
        ValueError: If the family is unknown, or a size absent or no positive integer.
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
        activation=activation_of(values),
        caps_scores=bool(values.get("attn_logit_softcapping")),
        caps_logits=bool(values.get("final_logit_softcapping")),
        tied=bool(values.get("tie_word_embeddings")),
    )
