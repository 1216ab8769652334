"""What a pass gives to memories apart from hidden states: inputs of the pass, and tensors from earlier layers."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from midus_hf.config.memory_entries import Memories, MemoryEntry
from midus_hf.memory.needs import SERVICES, mixin_for
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
        # Tensors that layers gave to later layers.
        self.carried: dict[Carried, torch.Tensor | None] = {}

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
        return "fetched" not in memory_class.context or name in self._values.get("fetched", ())

    def to(self, device: Any, non_blocking: bool = False) -> "MemoryInputs":
        """Return the inputs on another device; accelerate calls this before a layer if layers are on several devices."""
        moved = copy.copy(self)  # all copies share the tensors that layers carry
        moved._values = _moved(self._values, device, non_blocking)
        return moved


def _moved(value: Any, device: Any, non_blocking: bool) -> Any:
    """Return tensors, or objects that hold tensors, on another device; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: _moved(inner, device, non_blocking) for key, inner in value.items()}
    return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value


@mixin_for("skip", "depth")
class CarriesTensors:
    """Mixin for a host layer that takes tensors from earlier layers, and gives tensors to later layers."""

    # Tensors that the layer takes from earlier layers.
    takes: tuple[Carried, ...] = ()
    # Tensors that the layer gives to later layers.
    gives: tuple[Carried, ...] = ()

    def host(self, config: Any, layer_idx: int, memories: Memories) -> None:
        """Build the memories that are attached to the layer, and set which tensors the layer takes and gives."""
        super().host(config, layer_idx, memories)
        attached = memories.attached.values()
        self.takes = tuple(carried for entry in attached for carried in taken_at(entry, layer_idx))
        self.gives = tuple(carried for entry in attached for carried in given_at(entry, layer_idx))

    def __call__(
        self, hidden_states: torch.Tensor, *args: Any, memory_inputs: MemoryInputs | None = None, **kwargs: Any
    ) -> Any:
        """Call the layer with the tensors from earlier layers as inputs, and the tensors for later layers as outputs.

        So no layer changes `memory_inputs` while it runs, and both kinds of activation checkpointing treat these tensors as they
        treat hidden states.
        """
        call: Any = super().__call__
        if not self.takes and not self.gives:
            return call(hidden_states, *args, memory_inputs=memory_inputs, **kwargs)
        assert memory_inputs is not None, "a model whose layers carry something calls them with memory_inputs"
        taken = [memory_inputs.carried[key] for key in self.takes]
        output, *for_later = call(hidden_states, *taken, *args, memory_inputs=memory_inputs, **kwargs)
        memory_inputs.carried.update(zip(self.gives, for_later, strict=True))
        return output

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns; if it takes or gives tensors, a tuple of this and the tensors given, in their order.

        Args:
            hidden_states: The residual stream before this layer, `[B, T, D]`.
            args: Tensors from earlier layers, in the order of `takes`, then other arguments of the layer's forward.
            kwargs: Other arguments of the layer's forward.
        """
        if not self.takes and not self.gives:
            return super().forward(hidden_states, *args, **kwargs)
        carried: dict[Carried, torch.Tensor | None] = dict(zip(self.takes, args, strict=False))
        output = super().forward(hidden_states, *args[len(self.takes) :], carried=carried, **kwargs)
        return output, *(carried.get(key) for key in self.gives)


def given_at(entry: MemoryEntry, layer: int) -> tuple[Carried, ...]:
    """Return the tensors that a layer's memory gives to later layers; none if the layer does not have the memory."""
    if layer not in entry.layers:
        return ()
    index = entry.layers.index(layer)
    skips = (Carried(entry.name, layer),) if entry.into and entry.into[index] != layer else ()
    return (*skips, *(Carried(entry.name, layer, part) for part in entry.options.gives(index, len(entry.layers))))


def taken_at(entry: MemoryEntry, layer: int) -> tuple[Carried, ...]:
    """Return the tensors that a layer takes from the memory of earlier layers."""
    skips = tuple(Carried(entry.name, read) for read in skips_into(entry, layer) if read != layer)
    if layer not in entry.layers:
        return skips
    taken = entry.options.takes(entry.layers.index(layer))
    return (*skips, *(Carried(entry.name, entry.layers[index], part) for index, part in taken))


def skips_into(entry: MemoryEntry, layer: int) -> tuple[int, ...]:
    """Return the layers at which a memory reads the input for results that are added behind `layer`."""
    return tuple(read for read, into in zip(entry.layers, entry.into, strict=False) if into == layer)
