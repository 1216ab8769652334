"""Inputs of memories in a forward pass, apart from hidden states."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from midus_hf.memory.needs import SERVICES
from midus_hf.memory.registry import MemoryModule


class Carried(NamedTuple):
    """Key of a tensor that one layer of a pass gives to later layers.

    Args:
        name: Name of the memory.
        layer: Index of the layer that gives the tensor.
        part: Name of the tensor, for memories that give several per layer. Default: `"output"`.
    """

    name: str
    layer: int
    part: str = "output"


class MemoryInputs:
    """Inputs of a model's memories in one forward pass.

    One object is made per pass, and passed through the layers as a keyword argument, so that modules store nothing of a pass. Two
    passes may therefore run before one backward pass, and activation checkpointing repeats a layer with the same inputs.

    Args:
        values: What each service made for the pass, by the name of the service. Default: nothing.
    """

    def __init__(self, values: Mapping[str, Any] | None = None):
        self._values = values or {}
        self._carried: dict[Carried, torch.Tensor | None] = {}

    def of(self, memory_class: type[MemoryModule], name: str, layer: int) -> dict[str, Any]:
        """Return a memory's keyword arguments: what was passed, its tables if it shares some, and its `context`.

        Args:
            memory_class: Class of the memory's module, which PEFT may have wrapped since.
            name: Name of an attached memory; empty for an inserted memory.
            layer: Index of the memory's layer.
        """
        inputs: dict[str, Any] = {}
        for keyword in ("arguments", "tables", *memory_class.context):
            if keyword in SERVICES:
                inputs |= SERVICES[keyword].given(self._values.get(keyword), memory_class, name, layer)
        return inputs

    def are_there_for(self, memory_class: type[MemoryModule], name: str) -> bool:
        """Return whether a memory has something to do. A memory that fetches blocks has nothing to do if none were fetched for it."""
        for keyword in memory_class.context:
            if keyword in SERVICES and not SERVICES[keyword].has_work(self._values.get(keyword), name):
                return False
        return True

    def to(self, device: Any, non_blocking: bool = False) -> "MemoryInputs":
        """Return the inputs on another device; accelerate calls this before a layer if layers are on several devices."""
        moved = copy.copy(self)  # all copies share the tensors that layers carry
        moved._values = _moved(self._values, device, non_blocking)
        return moved

    def carry(self, keys: Sequence[Carried], tensors: Sequence[torch.Tensor | None]) -> None:
        """Store the tensors that a layer gives to later layers."""
        self._carried.update(zip(keys, tensors, strict=True))

    def carried(self, keys: Sequence[Carried]) -> list[torch.Tensor | None]:
        """Return tensors that earlier layers gave, in the order of `keys`."""
        return [self._carried[key] for key in keys]

    def release(self, keys: Sequence[Carried]) -> None:
        """Drop tensors that no later layer takes."""
        for key in keys:
            del self._carried[key]


def _moved(value: Any, device: Any, non_blocking: bool) -> Any:
    """Return tensors, or objects that hold tensors, on another device; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: _moved(inner, device, non_blocking) for key, inner in value.items()}
    return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value
