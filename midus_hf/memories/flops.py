"""Floating-point operations of a model for a batch, and of its memories.

Every family is counted as in Mixture of Chapters, appendix A.2. Attention counts as if every token attended to every
token, whatever causal masks or sliding windows hide. Work done once for all layers, such as rotary angles, is not
counted, and neither are lookups in tables.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from midus_hf.config.backbone import Backbone
from midus_hf.config.flops import (
    ACTIVATIONS,
    TANH,
    attention_products,
    attention_weights,
    cross_entropy,
    linear,
    rms_norm,
    rotary_embedding,
)
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.entries import Memories
from midus_hf.memories.options import InsertedOptions, MemoryOptions
from midus_hf.memories.registry import import_beside

# FLOPs of capping a number softly: a division, a tanh and a product.
SOFT_CAP = TANH + 2


#: The count of a memory's operations in one layer, and of the values that a token reads there, by the class of options.
FLOPS: dict[type[MemoryOptions], Callable[..., dict[str, int]]] = {}
VALUES_READ: dict[type[MemoryOptions], Callable[..., int]] = {}


def flops_of(options_class: type[MemoryOptions]) -> Callable[[Any], Any]:
    """Return a decorator for the function that counts a memory's operations, with the arguments of `memory_flops`."""

    def decorate(function: Any) -> Any:
        FLOPS[options_class] = function
        return function

    return decorate


def values_read_of(options_class: type[MemoryOptions]) -> Callable[[Any], Any]:
    """Return a decorator for the function that counts the values that a token reads, with the arguments of `values_read`."""

    def decorate(function: Any) -> Any:
        VALUES_READ[options_class] = function
        return function

    return decorate


def memory_flops(
    options: MemoryOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the floating-point operations of a memory in one layer and forward pass, its residual adds included.

    Args:
        options: Options of the memory.
        sizes: Sizes of the model.
        batch: B, sequences in the batch.
        tokens: T, tokens per sequence.
        index: Number of the layer among the layers that have the memory, from 0.
        count: Number of layers that have the memory.

    Returns:
        Operations by the name of their purpose.

    Raises:
        ValueError: If the FLOPs of the memory are unknown.
    """
    counted = _counted(FLOPS, options)
    if counted is None:
        raise ValueError(
            f"the FLOPs of memory type {options.type!r} are unknown; expected a function with the decorator "
            f"flops_of({type(options).__name__}) in the module 'costs' beside its options. Leave the memory out of the config to "
            "count the rest."
        )
    return counted(options, sizes, batch, tokens, index, count)


def values_read(options: MemoryOptions, sizes: ModelSizes) -> int | None:
    """Return the number of elements of the values that one token reads in one layer; None if it reads all elements."""
    counted = _counted(VALUES_READ, options)
    return None if counted is None else counted(options, sizes)


def _counted(
    table: Mapping[type[MemoryOptions], Callable[..., Any]], options: MemoryOptions
) -> Callable[..., Any] | None:
    """Return the function of the nearest class of options that has one; None if none has."""
    import_beside(type(options), "costs")
    return next((table[each] for each in type(options).__mro__ if each in table), None)


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of one forward pass, by the name of the part of the model.

    Args:
        layers: Operations by part, for each layer. A memory's parts are named `NAME: PART`, or `TYPE: PART` if it is
            inserted.
        outside: Operations by part of the embedding, the final norm, the language head and the loss.
    """

    layers: tuple[dict[str, int], ...]
    outside: dict[str, int]

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
        """Operations of the backward pass, twice the forward pass: all parameters train, and nothing is recomputed."""
        return 2 * self.forward

    @property
    def total(self) -> int:
        """Operations of the forward and the backward pass."""
        return self.forward + self.backward


def estimate_flops(backbone: Backbone, memories: Memories, tokens: int, batch: int = 1) -> ModelFlops:
    """Count the floating-point operations of a model for one batch.

    Args:
        backbone: The model without its memories.
        memories: Memories of the model.
        tokens: T, tokens per sequence.
        batch: B, sequences in the batch. Default: 1.

    Raises:
        ValueError: If tokens or batch is below 1, or if the FLOPs of the activation or of a memory are unknown.
    """
    for name, value in (("sequence length", tokens), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more.")
    sizes = backbone.sizes

    def layer_parts(layer: int) -> dict[str, int]:
        entry = memories.inserted.get(layer)
        if entry is not None:
            assert isinstance(entry.options, InsertedOptions)
            parts = _attention(backbone, batch, tokens, keeps_output=entry.options.output_projection)
        else:
            parts = _layer(backbone, batch, tokens)
        for memory in (*memories.attached_to(layer), *(() if entry is None else (entry,))):
            counted = memory_flops(
                memory.options, sizes, batch, tokens, memory.layers.index(layer), len(memory.layers)
            )
            parts |= {f"{memory.name or memory.options.type}: {part}": count for part, count in counted.items()}
        return {part: count for part, count in parts.items() if count}

    layers = tuple(layer_parts(layer) for layer in range(sizes.num_layers))
    return ModelFlops(layers, {part: count for part, count in _outside(backbone, batch, tokens).items() if count})


def _layer(backbone: Backbone, batch: int, tokens: int) -> dict[str, int]:
    """Count the operations of a layer of the base, its residual adds included."""
    hidden, inner, rows = backbone.sizes.hidden_size, backbone.sizes.intermediate_size, batch * tokens
    if backbone.sizes.activation not in ACTIVATIONS:
        raise ValueError(
            f"the activation is {backbone.sizes.activation!r}, whose FLOPs are unknown; expected one of: {', '.join(ACTIVATIONS)}."
        )
    attention = _attention(backbone, batch, tokens, keeps_output=True)
    norms = backbone.input_norms + backbone.output_norms
    return {
        **attention,
        "norms": attention["norms"] + norms * rms_norm(rows, hidden),
        "feed-forward": 2 * linear(rows, hidden, inner, backbone.mlp_bias)
        + linear(rows, inner, hidden, backbone.mlp_bias)
        + rows * inner * (ACTIVATIONS[backbone.sizes.activation] + 1),
        "residual adds": 2 * rows * hidden,
    }


def _attention(backbone: Backbone, batch: int, tokens: int, keeps_output: bool) -> dict[str, int]:
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


def _outside(backbone: Backbone, batch: int, tokens: int) -> dict[str, int]:
    hidden, rows = backbone.sizes.hidden_size, batch * tokens
    return {
        "embedding": rows * hidden if backbone.scales_embedding else 0,
        "final norm": rms_norm(rows, hidden),
        "language head": linear(rows, hidden, backbone.vocabulary)
        + (rows * backbone.vocabulary * SOFT_CAP if backbone.caps_logits else 0),
        "cross entropy": cross_entropy(batch, tokens, backbone.vocabulary),
    }
