"""Inputs of memories in a forward pass, apart from hidden states."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from midus_hf.memory.fetched import FetchedBatch
from midus_hf.memory.memory_state import MemoryState
from midus_hf.memory.registry import MemoryModule
from midus_hf.memory.routing.report import RouterReports
from midus_hf.memory.routing.token_places import TokenPlaces


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
        arguments: Keyword arguments of the model's forward that memories take. Default: none.
        tables: For each attached memory, by name, the tables of each layer that shares tables, by index. Default: none.
        tokens: Padding and documents. Default: no padding, one document per row.
        states: States of the sequences, by memory and layer. Default: sequences begin here, and no state is kept.
        reports: Collector of the routers' reports. Default: routers do not report.
        fetched: Blocks that the texts of the pass fetched, by the name of the memory. Default: none.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any] | None = None,
        tables: Mapping[str, Mapping[int, Mapping[str, torch.Tensor]]] | None = None,
        tokens: TokenPlaces | None = None,
        states: Mapping[tuple[str, int], MemoryState] | None = None,
        reports: RouterReports | None = None,
        fetched: Mapping[str, FetchedBatch] | None = None,
    ):
        self._arguments, self._tables = arguments or {}, tables or {}
        self._tokens, self._states, self._reports = tokens, states or {}, reports
        self._fetched = fetched or {}
        self._carried: dict[Carried, torch.Tensor | None] = {}

    def of(self, memory_class: type[MemoryModule], name: str, layer: int) -> dict[str, Any]:
        """Return a memory's keyword arguments: what was passed, its tables if it shares some, and its `context`.

        Args:
            memory_class: Class of the memory's module, which PEFT may have wrapped since.
            name: Name of an attached memory; empty for an inserted memory.
            layer: Index of the memory's layer.
        """
        inputs = {key: self._arguments[key] for key in memory_class.forward_arguments if key in self._arguments}
        if layer in self._tables.get(name, {}):
            inputs["tables"] = self._tables[name][layer]
        if "tokens" in memory_class.context:
            inputs["tokens"] = self._tokens or TokenPlaces()
        if "state" in memory_class.context and (name, layer) in self._states:
            inputs["state"] = self._states[name, layer]
        if "fetched" in memory_class.context:
            inputs["fetched"] = self._fetched[name].of(layer)
        if "report" in memory_class.context and self._reports is not None:
            inputs["report"] = self._reports.of(name, layer)
        return inputs

    def are_there_for(self, memory_class: type[MemoryModule], name: str) -> bool:
        """Return whether a memory has something to do. A memory that fetches blocks has nothing to do if none were fetched for it."""
        return "fetched" not in memory_class.context or name in self._fetched

    def to(self, device: Any, non_blocking: bool = False) -> "MemoryInputs":
        """Return the inputs on another device; accelerate calls this before a layer if layers are on several devices."""
        moved = copy.copy(self)  # all copies share the tensors that layers carry
        for name in ("_arguments", "_tables", "_tokens", "_fetched"):
            setattr(moved, name, _moved(getattr(self, name), device, non_blocking))
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
    """Return tensors, or objects that hold tensors, on another device."""
    if isinstance(value, Mapping):
        return {key: _moved(inner, device, non_blocking) for key, inner in value.items()}
    return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value
