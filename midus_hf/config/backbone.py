"""Facts about model types that are known before a model is built, and the description of a decoder for counting FLOPs."""

from dataclasses import dataclass
from typing import NamedTuple

from midus_hf.config.model_sizes import ModelSizes

MEMORY_PREFIX = "midus_"

#: Types that every method supports and that the test suite proves, so that no run has to.
PROVEN = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "olmo2")


class TokenTables(NamedTuple):
    """What of a type has a size for each token.

    Args:
        keys: Keys of the config by which these tables or the logits get their size.
        inputs: Full names of the parameters of which a pass reads the rows that ids number.
    """

    keys: tuple[str, ...]
    inputs: tuple[str, ...]


#: The tables of the proven types.
PROVEN_TABLES = TokenTables(("vocab_size",), ("model.embed_tokens.weight",))

#: Types among these that multiply embeddings by a number, which is not visible in their modules.
SCALE_EMBEDDINGS = ("gemma2", "gemma3_text")


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A decoder without its memories, for counting operations.

    Args:
        sizes: Sizes that memories are built for.
        vocabulary: V, the number of tokens in the vocabulary.
        attention_bias: Whether queries, keys and values have biases.
        output_bias: Whether the output projection of attention has a bias.
        mlp_bias: Whether the feed-forward network has biases.
        query_key_norm: Width of the vectors that a norm of queries and keys is over, `(query, key)`; None if there is no norm.
        input_norms: Whether a norm precedes attention and the feed-forward network.
        output_norms: Whether a norm follows attention and the feed-forward network.
        scales_embedding: Whether embeddings are multiplied by a number.
        caps_scores: Whether a tanh caps attention scores softly.
        caps_logits: Whether a tanh caps logits softly.
    """

    sizes: ModelSizes
    vocabulary: int
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: tuple[int, int] | None
    input_norms: bool
    output_norms: bool
    scales_embedding: bool
    caps_scores: bool
    caps_logits: bool


# Names of a layer's projections in the families' code, by the role of the projection.
PROJECTION_NAMES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output_projection": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
