"""Floating-point operations (FLOPs) of operations and of a decoder, by the rules of Mixture of Chapters (appendix A.2).

A multiplication and an addition count one each, so a matrix product counts two per weight. An elementwise operation has
a fixed number of FLOPs per element. Where the paper gives none, the number in the paper's code counts. Memory traffic,
dropout and the optimizer are not counted.

Attention counts as if every token attended to every token, regardless of causal masks or sliding windows. Work done once
for all layers, such as rotary angles, is not counted.
"""

import math
from dataclasses import dataclass

from midus_hf.config.errors import RequestError
from midus_hf.config.model_sizes import ModelSizes

# FLOPs of a softmax per number, and of cross entropy.
SOFTMAX = 5

# FLOPs of masking and scaling attention scores, per score.
MASK_AND_SCALE = 2

# FLOPs of a sigmoid or a tanh, per number.
SIGMOID = TANH = 4

# FLOPs of capping a number softly: a division, a tanh and a product.
SOFT_CAP = TANH + 2

# FLOPs of activations per number, by their name in configs.
ACTIVATIONS = {"silu": 4, "swish": 4, "gelu": 8, "gelu_new": 8, "gelu_pytorch_tanh": 8, "relu": 1}


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


def linear(rows: int, inputs: int, outputs: int, bias: bool = False) -> int:
    """Return the FLOPs of a linear map of `rows` vectors: a product of `[rows, inputs]` with `[inputs, outputs]`."""
    return 2 * rows * inputs * outputs + (rows * outputs if bias else 0)


def attention_products(batch: int, queries: int, keys: int, width: int) -> int:
    """Return the FLOPs of the attention scores and the weighted sums of values, for all heads together.

    Args:
        batch: B, sequences in the batch.
        queries: Number of queries per sequence.
        keys: Number of keys that each query is compared with, masked keys included.
        width: Width of all heads together.
    """
    return 4 * batch * queries * keys * width


def attention_weights(batch: int, heads: int, queries: int, keys: int) -> int:
    """Return the FLOPs of the softmax, mask and scale of all attention scores.

    Args:
        batch: B, sequences in the batch.
        heads: Number of query heads.
        queries: Number of queries per sequence.
        keys: Number of keys that each query is compared with, masked keys included.
    """
    return batch * heads * queries * keys * (SOFTMAX + MASK_AND_SCALE)


def rms_norm(rows: int, width: int) -> int:
    """Return the FLOPs of an RMSNorm of `rows` vectors."""
    return rows * (4 * width + 4)


def layer_norm(rows: int, width: int) -> int:
    """Return the FLOPs of a norm that also subtracts the mean, over features or over a batch."""
    return rows * (8 * width + 8)


def rotary_embedding(rows: int, query_width: int, key_width: int) -> int:
    """Return the FLOPs of the rotation of queries and keys."""
    return 3 * rows * (query_width + key_width)


def top_k(rows: int, candidates: int, k: int) -> int:
    """Return the FLOPs of the choice of the k largest candidates of each row."""
    return rows * candidates * max(1, math.ceil(math.log2(k)))


def cross_entropy(batch: int, tokens: int, vocabulary: int) -> int:
    """Return the FLOPs of the loss of predicting every token of a sequence but the first."""
    return batch * (tokens - 1) * vocabulary * SOFTMAX


def router_losses(choices: int, candidates: int, k: int) -> int:
    """Return the FLOPs of a router's losses as the paper's code counts them; the paper states no formula.

    For s choices among c candidates, the load-balance loss takes s c (k - 1) + c (s - 1) + c operations for the
    frequencies of candidates, c (s - 1) + c for mean probabilities and 2 c for their product. The mean of squared
    probabilities takes s c + c (s - 1) + c, its distance from an even distribution 3 c, the z-loss 5 s c + 2 s, the
    entropy 4 s c. Squares and entropy count, although neither adds to the loss.
    """
    sums = candidates * choices
    load_balance = sums * (k - 1) + sums + sums + 2 * candidates
    squares = 2 * sums + 3 * candidates
    z_loss, entropy = 5 * sums + 2 * choices, 4 * sums
    return load_balance + squares + z_loss + entropy


def layer_of_base(backbone: Backbone, batch: int, tokens: int) -> dict[str, int]:
    """Count the operations of a layer of the base, its residual adds included."""
    hidden, inner, rows = backbone.sizes.hidden_size, backbone.sizes.intermediate_size, batch * tokens
    if backbone.sizes.activation not in ACTIVATIONS:
        raise RequestError(
            f"the activation is {backbone.sizes.activation!r}, whose FLOPs are unknown; expected one of: {', '.join(ACTIVATIONS)}."
        )
    attention = attention_of(backbone, batch, tokens, keeps_output=True)
    norms = backbone.input_norms + backbone.output_norms
    return {
        **attention,
        "norms": attention["norms"] + norms * rms_norm(rows, hidden),
        "feed-forward": 2 * linear(rows, hidden, inner, backbone.mlp_bias)
        + linear(rows, inner, hidden, backbone.mlp_bias)
        + rows * inner * (ACTIVATIONS[backbone.sizes.activation] + 1),
        "residual adds": 2 * rows * hidden,
    }


def attention_of(backbone: Backbone, batch: int, tokens: int, keeps_output: bool) -> dict[str, int]:
    """Count the operations of attention and of the norms before, inside and after attention."""
    sizes, rows = backbone.sizes, batch * tokens
    query, key = sizes.num_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    inner_norms = sum(
        rms_norm(rows * width // norm_width, norm_width)
        for width, norm_width in zip((query, key), backbone.query_key_norm or (), strict=False)
    )
    norms = backbone.input_norms + (keeps_output and backbone.output_norms)
    scores = batch * sizes.num_heads * tokens * tokens
    return {
        "attention": linear(rows, sizes.hidden_size, query, backbone.attention_bias)
        + 2 * linear(rows, sizes.hidden_size, key, backbone.attention_bias)
        + (linear(rows, query, sizes.hidden_size, backbone.output_bias) if keeps_output else 0)
        + attention_products(batch, tokens, tokens, query)
        + attention_weights(batch, sizes.num_heads, tokens, tokens)
        + (scores * SOFT_CAP if backbone.caps_scores else 0),
        "rotary embedding": rotary_embedding(rows, query, key),
        "norms": inner_norms + norms * rms_norm(rows, sizes.hidden_size),
    }


def outside_of_layers(backbone: Backbone, batch: int, tokens: int) -> dict[str, int]:
    """Count the operations of the embedding, the final norm, the language head and the loss."""
    hidden, rows = backbone.sizes.hidden_size, batch * tokens
    return {
        "embedding": rows * hidden if backbone.scales_embedding else 0,
        "final norm": rms_norm(rows, hidden),
        "language head": linear(rows, hidden, backbone.vocabulary)
        + (rows * backbone.vocabulary * SOFT_CAP if backbone.caps_logits else 0),
        "cross entropy": cross_entropy(batch, tokens, backbone.vocabulary),
    }
