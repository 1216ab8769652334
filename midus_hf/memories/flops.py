"""FLOPs of a decoder and its memories, by the rules of Mixture of Chapters (appendix A.2).

A multiplication and an addition count one each, so a matrix product counts two per weight; an elementwise operation has a fixed
number of FLOPs per element, from the paper or else its code. Memory traffic, lookups, dropout, the optimizer and work done once for
all layers, such as rotary angles, are not counted. Attention counts as if every token attended to every token.
"""

import math
from collections import Counter
from dataclasses import dataclass

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.config.errors import RequestError
from midus_hf.memories.options import InsertedOptions
from midus_hf.memories.registry import Memories

# FLOPs of a softmax per number, and of cross entropy.
SOFTMAX = 5
MASK_AND_SCALE = 2
# FLOPs of a sigmoid or a tanh, per number.
SIGMOID = TANH = 4
SOFT_CAP = TANH + 2
ACTIVATIONS = {"silu": 4, "swish": 4, "gelu": 8, "gelu_new": 8, "gelu_pytorch_tanh": 8, "relu": 1}


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A decoder without its memories, for counting operations."""

    sizes: ModelSizes
    vocabulary: int  # V, the number of tokens in the vocabulary
    attention_bias: bool  # of queries, keys and values
    output_bias: bool  # of the output projection of attention
    mlp_bias: bool
    query_key_norm: tuple[int, int] | None  # width of the vectors that norms of queries and of keys are over
    input_norms: bool  # before attention and the feed-forward network
    output_norms: bool  # after both
    scales_embedding: bool
    caps_scores: bool  # softly, by a tanh
    caps_logits: bool


def linear(rows: int, inputs: int, outputs: int, bias: bool = False) -> int:
    """Return the FLOPs of a linear map of `rows` vectors: `[rows, inputs]` times `[inputs, outputs]`."""
    return 2 * rows * inputs * outputs + (rows * outputs if bias else 0)


def attention_products(batch: int, queries: int, keys: int, width: int) -> int:
    """Return the FLOPs of scores and weighted sums, masked keys included; `width` is that of all heads."""
    return 4 * batch * queries * keys * width


def attention_weights(batch: int, heads: int, queries: int, keys: int) -> int:
    """Return the FLOPs of the softmax, mask and scale of all attention scores."""
    return batch * heads * queries * keys * (SOFTMAX + MASK_AND_SCALE)


def rms_norm(rows: int, width: int) -> int:
    """Return the FLOPs of an RMSNorm of `rows` vectors."""
    return rows * (4 * width + 4)


def layer_norm(rows: int, width: int) -> int:
    """Return the FLOPs of a norm that also subtracts the mean, over features or over a batch."""
    return rows * (8 * width + 8)


def top_k(rows: int, candidates: int, k: int) -> int:
    """Return the FLOPs of the choice of the k largest candidates of each row."""
    return rows * candidates * max(1, math.ceil(math.log2(k)))


def router_losses(choices: int, candidates: int, k: int) -> int:
    """Return the FLOPs of a router's losses as the paper's code counts them; the paper states no formula.

    For s choices among c candidates, the load-balance loss takes s c (k - 1) + c (s - 1) + c operations for frequencies, c (s - 1)
    + c for mean probabilities and 2 c for their product; the mean of squared probabilities s c + c (s - 1) + c, its distance from
    an even distribution 3 c, the z-loss 5 s c + 2 s, the entropy 4 s c. Squares and entropy count, although neither adds to the
    loss.
    """
    sums = candidates * choices
    load_balance = sums * (k - 1) + sums + sums + 2 * candidates
    squares = 2 * sums + 3 * candidates
    z_loss, entropy = 5 * sums + 2 * choices, 4 * sums
    return load_balance + squares + z_loss + entropy


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of one forward pass, by the name of the part of the model."""

    layers: tuple[dict[str, int], ...]  # a memory's parts are named `NAME: PART`, or `TYPE: PART` if it is inserted
    outside: dict[str, int]  # the embedding, the final norm, the language head and the loss

    @property
    def parts(self) -> dict[str, int]:
        """Operations by part, summed over all layers, with the parts outside of layers."""
        summed: Counter[str] = Counter()
        for parts in (*self.layers, self.outside):
            summed.update(parts)
        return dict(summed)

    @property
    def forward(self) -> int:
        """Operations of the forward pass."""
        return sum(self.parts.values())

    @property
    def backward(self) -> int:
        """Operations of the backward pass: twice the forward's, as all parameters train."""
        return 2 * self.forward

    @property
    def total(self) -> int:
        """Operations of the forward and the backward pass."""
        return self.forward + self.backward


def estimate_flops(backbone: Backbone, memories: Memories, tokens: int, batch: int = 1) -> ModelFlops:
    """Count the operations of a model for one batch, default 1, of sequences of `tokens` tokens.

    Raises:
        RequestError: If tokens or batch is below 1, or if the FLOPs of the activation or of a memory are unknown.
    """
    for name, value in (("sequence length", tokens), ("batch", batch)):
        if value < 1:
            raise RequestError(f"{name} is {value}; expected 1 or more.")
    sizes, rows, hidden = backbone.sizes, batch * tokens, backbone.sizes.hidden_size

    def layer_parts(layer: int) -> dict[str, int]:
        entry = memories.inserted.get(layer)
        if entry is not None:
            assert isinstance(entry.options, InsertedOptions)
            parts = _attention_flops(backbone, batch, tokens, keeps_output=entry.options.output_projection)
        else:
            parts = _base_layer_flops(backbone, batch, tokens)
        for memory in (*memories.attached_to(layer), *(() if entry is None else (entry,))):
            place, count = memory.layers.index(layer), len(memory.layers)
            counted = memory.options.flops(sizes, batch, tokens, place, count)
            parts |= {f"{memory.name or memory.options.type}: {part}": count for part, count in counted.items()}
        return {part: count for part, count in parts.items() if count}

    outside = {
        "embedding": rows * hidden if backbone.scales_embedding else 0,
        "final norm": rms_norm(rows, hidden),
        "language head": linear(rows, hidden, backbone.vocabulary)
        + (rows * backbone.vocabulary * SOFT_CAP if backbone.caps_logits else 0),
        # The loss of predicting every token of a sequence except the first.
        "cross entropy": batch * (tokens - 1) * backbone.vocabulary * SOFTMAX,
    }
    return ModelFlops(
        tuple(map(layer_parts, range(sizes.num_layers))), {part: count for part, count in outside.items() if count}
    )


def _base_layer_flops(backbone: Backbone, batch: int, tokens: int) -> dict[str, int]:
    hidden, inner, rows = backbone.sizes.hidden_size, backbone.sizes.intermediate_size, batch * tokens
    if backbone.sizes.activation not in ACTIVATIONS:
        raise RequestError(
            f"the activation is {backbone.sizes.activation!r}, whose FLOPs are unknown; expected one of: {', '.join(ACTIVATIONS)}."
        )
    attention = _attention_flops(backbone, batch, tokens, keeps_output=True)
    norms = backbone.input_norms + backbone.output_norms
    return {
        **attention,
        "norms": attention["norms"] + norms * rms_norm(rows, hidden),
        "feed-forward": 2 * linear(rows, hidden, inner, backbone.mlp_bias)
        + linear(rows, inner, hidden, backbone.mlp_bias)
        + rows * inner * (ACTIVATIONS[backbone.sizes.activation] + 1),
        "residual adds": 2 * rows * hidden,
    }


def _attention_flops(backbone: Backbone, batch: int, tokens: int, keeps_output: bool) -> dict[str, int]:
    """Count the operations of attention and of the norms before, inside and after it."""
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
        "rotary embedding": 3 * rows * (query + key),
        "norms": inner_norms + norms * rms_norm(rows, sizes.hidden_size),
    }
