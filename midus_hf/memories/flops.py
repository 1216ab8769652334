"""Floating-point operations of memories, and of a model with its memories for a batch. Lookups in tables are not counted."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from midus_hf.config.errors import RequestError
from midus_hf.config.flops import Backbone, attention_of, layer_of_base, outside_of_layers
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.entries import Memories
from midus_hf.memories.options import InsertedOptions, MemoryOptions
from midus_hf.memories.registry import import_beside

#: Functions that count a memory's operations in one layer, and the values that a token reads there, by the class of options.
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
        RequestError: If the FLOPs of the memory are unknown.
    """
    counted = _counted(FLOPS, options)
    if counted is None:
        raise RequestError(
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
        RequestError: If tokens or batch is below 1, or if the FLOPs of the activation or of a memory are unknown.
    """
    for name, value in (("sequence length", tokens), ("batch", batch)):
        if value < 1:
            raise RequestError(f"{name} is {value}; expected 1 or more.")
    sizes = backbone.sizes

    def layer_parts(layer: int) -> dict[str, int]:
        entry = memories.inserted.get(layer)
        if entry is not None:
            assert isinstance(entry.options, InsertedOptions)
            parts = attention_of(backbone, batch, tokens, keeps_output=entry.options.output_projection)
        else:
            parts = layer_of_base(backbone, batch, tokens)
        for memory in (*memories.attached_to(layer), *(() if entry is None else (entry,))):
            counted = memory_flops(
                memory.options, sizes, batch, tokens, memory.layers.index(layer), len(memory.layers)
            )
            parts |= {f"{memory.name or memory.options.type}: {part}": count for part, count in counted.items()}
        return {part: count for part, count in parts.items() if count}

    layers = tuple(layer_parts(layer) for layer in range(sizes.num_layers))
    return ModelFlops(
        layers, {part: count for part, count in outside_of_layers(backbone, batch, tokens).items() if count}
    )
