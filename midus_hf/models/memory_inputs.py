"""What a forward pass brings to memories beside hidden states."""

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
    """What one layer of a pass gives for later ones.

    Args:
        name: Of the memory.
        layer: That gives it.
        part: What it is, for memories that give several.
    """

    name: str
    layer: int
    part: str = "output"


class MemoryInputs:
    """What one forward pass of a model brings to its memories.

    It is made for one pass and travels through the layers as a keyword argument, so nothing of a pass is left on modules: two
    passes may run before one backward pass, and activation checkpointing repeats a layer with the same.

    Args:
        given: The keyword arguments of the model's forward that memories ask for. Default: none.
        tables: For each attached memory, the tables of each layer that shares some, by its index. Default: none.
        tokens: Where the tokens of the pass stand. Default: no padding, one document per row.
        states: What memories keep of the sequences, by name and layer. Default: they begin here, and nothing is kept.
        reports: Where routers tell what they do. Default: nobody wants to know.
        fetched: What the texts of the pass fetched, by the name of the memory. Default: nothing.
    """

    def __init__(
        self,
        given: Mapping[str, Any] | None = None,
        tables: Mapping[str, Mapping[int, Mapping[str, torch.Tensor]]] | None = None,
        tokens: TokenPlaces | None = None,
        states: Mapping[tuple[str, int], MemoryState] | None = None,
        reports: RouterReports | None = None,
        fetched: Mapping[str, FetchedBatch] | None = None,
    ):
        self._given, self._tables = given or {}, tables or {}
        self._tokens, self._states, self._reports = tokens, states or {}, reports
        self._fetched = fetched or {}
        self._carried: dict[Carried, torch.Tensor | None] = {}

    def of(self, memory_class: type[MemoryModule], name: str, layer: int) -> dict[str, Any]:
        """The keyword arguments of a memory: those of its `inputs` that were given, `tables` where it shares some, what it `asks`.

        Args:
            memory_class: Of its module, which PEFT may have wrapped since.
            name: That it is attached by; empty where it is inserted.
            layer: That it is in.
        """
        inputs = {key: self._given[key] for key in memory_class.inputs if key in self._given}
        if layer in self._tables.get(name, {}):
            inputs["tables"] = self._tables[name][layer]
        if "tokens" in memory_class.asks:
            inputs["tokens"] = self._tokens or TokenPlaces()
        if "state" in memory_class.asks and (name, layer) in self._states:
            inputs["state"] = self._states[name, layer]
        if "fetched" in memory_class.asks:
            inputs["fetched"] = self._fetched[name].of(layer)
        if "report" in memory_class.asks and self._reports is not None:
            inputs["report"] = self._reports.of(name, layer)
        return inputs

    def are_there_for(self, memory_class: type[MemoryModule], name: str) -> bool:
        """Whether there is anything for a memory to do: one that fetches has nothing to do where nothing was fetched."""
        return "fetched" not in memory_class.asks or name in self._fetched

    def to(self, device: Any, non_blocking: bool = False) -> "MemoryInputs":
        """The same on another device: what accelerate asks for in front of a layer that lies on one of several."""
        moved = copy.copy(self)  # what layers carry is one for all copies
        for name in ("_given", "_tables", "_tokens", "_fetched"):
            setattr(moved, name, _moved(getattr(self, name), device, non_blocking))
        return moved

    def carry(self, keys: Sequence[Carried], tensors: Sequence[torch.Tensor | None]) -> None:
        """Keep what a layer gives for the layers that take it."""
        self._carried.update(zip(keys, tensors, strict=True))

    def carried(self, keys: Sequence[Carried]) -> list[torch.Tensor | None]:
        """What earlier layers gave."""
        return [self._carried[key] for key in keys]

    def release(self, keys: Sequence[Carried]) -> None:
        """Forget what no later layer takes."""
        for key in keys:
            del self._carried[key]


def _moved(value: Any, device: Any, non_blocking: bool) -> Any:
    """Tensors, or what holds them, on another device."""
    if isinstance(value, Mapping):
        return {key: _moved(inner, device, non_blocking) for key, inner in value.items()}
    return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value
