"""Layers that serve memories in an engine that lays tokens of several requests in one row and keeps keys and values in pages: vLLM.

A memory that reads the tokens before has a module `paged` beside its options, with a subclass of its layer under
`@paged_layer_of(Layer)`. It is found when a model is made with attention `"vllm"`, and does not travel with checkpoints.
"""

from collections.abc import Callable
from typing import TypeVar

from midus_hf.memories.module import MemoryModule
from midus_hf.memories.registry import import_beside

PagedLayer = TypeVar("PagedLayer", bound=type[MemoryModule])

_PAGED: dict[type[MemoryModule], type[MemoryModule]] = {}


def paged_layer_of(layer: type[MemoryModule]) -> Callable[[PagedLayer], PagedLayer]:
    """Return a decorator that makes a subclass of a memory's layer the one that serves the memory in vLLM."""

    def decorate(cls: PagedLayer) -> PagedLayer:
        _PAGED[layer] = cls
        return cls

    return decorate


def as_served(memory: MemoryModule, implementation: str | None) -> MemoryModule:
    """Return a memory as the engine of an implementation of attention runs it, taken over in place.

    Args:
        memory: The memory.
        implementation: Name of the implementation of the model's attention.
    """
    if implementation == "vllm":
        import_beside(type(memory.options), "paged")
        memory.__class__ = _PAGED.get(type(memory), type(memory))
    return memory
