"""What a pass gives to memories apart from hidden states: inputs of the pass, and tensors from earlier layers."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from midus_hf.config.errors import RequestError
from midus_hf.memories.entries import MemoryEntry
from midus_hf.memories.hosting.parts import Keywords
from midus_hf.memories.module import MemoryModule


class CarriedKey(NamedTuple):
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

    One object is made per pass and passed to the layers as a keyword argument. A layer's forward keeps it for its thread until it
    returns. So two passes may run before one backward pass, and activation checkpointing repeats a layer with the same inputs.

    Args:
        values: What each service made for the pass, by the key of the service. Default: nothing.
        arguments: Arguments of the model's forward that memories take, by name. Default: none.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, arguments: Mapping[str, object] | None = None):
        self._values, self._arguments = values or {}, arguments or {}
        # Tensors that layers gave to later layers.
        self.carried: dict[CarriedKey, torch.Tensor | None] = {}

    def arguments_for(self, memory_class: type[MemoryModule], name: str, layer: int) -> Keywords:
        """Return a memory's keyword arguments: its `forward_arguments` that were passed, and what its services give.

        Args:
            memory_class: Class of the memory's module, which PEFT may have wrapped since.
            name: Name of an attached memory; empty for an inserted memory.
            layer: Index of the memory's layer.
        """
        inputs = {key: self._arguments[key] for key in memory_class.forward_arguments if key in self._arguments}
        for service in memory_class.services:
            inputs |= service.given(self._values.get(service.key), name, layer)
        return inputs

    def are_there_for(self, memory_class: type[MemoryModule], name: str) -> bool:
        """Return whether a memory has something to do. It has nothing to do if a service that it requires made nothing for it."""
        required = (service.key for service in memory_class.services if service.is_required)
        return all(name in self._values.get(key, ()) for key in required)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "MemoryInputs":
        """Return the inputs on another device; accelerate calls this before a layer if layers are on several devices."""
        moved = copy.copy(self)  # all copies share the tensors that layers carry
        moved._values = _moved(self._values, device, non_blocking)
        moved._arguments = _moved(self._arguments, device, non_blocking)
        return moved


def _moved(value: object, device: Any, non_blocking: bool) -> Any:
    """Return tensors, or objects that hold tensors, on another device; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: _moved(inner, device, non_blocking) for key, inner in value.items()}
    return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value


def arguments_of_pass(names: set[str], arguments: Keywords, own: Keywords) -> Keywords:
    """Return the arguments of a model's forward that memories take, by name.

    Args:
        names: Names of the arguments that memories take.
        arguments: Arguments of the family's forward.
        own: Arguments that the family's forward does not get.

    Raises:
        RequestError: If a memory takes `input_ids`, and embeddings are passed alone.
    """
    values = {name: arguments.get(name, own.get(name)) for name in names}
    if "input_ids" in values and values["input_ids"] is None:
        values["input_ids"] = own["token_ids"]
        if values["input_ids"] is None:
            raise RequestError(
                "inputs_embeds is passed alone, and a memory of this model reads input_ids; expected input_ids. Or pass the ids "
                "beside the embeddings, as token_ids."
            )
    return {name: value for name, value in values.items() if value is not None}


def given_at(entry: MemoryEntry, layer: int) -> tuple[CarriedKey, ...]:
    """Return the tensors that a layer's memory gives to later layers; none if the layer does not have the memory."""
    if layer not in entry.layers:
        return ()
    index = entry.layers.index(layer)
    skips = (CarriedKey(entry.name, layer),) if entry.into and entry.into[index] != layer else ()
    return (
        *skips,
        *(CarriedKey(entry.name, layer, part) for part in entry.options.layer_outputs(index, len(entry.layers))),
    )


def taken_at(entry: MemoryEntry, layer: int) -> tuple[CarriedKey, ...]:
    """Return the tensors that a layer takes from the memory of earlier layers."""
    skips = tuple(CarriedKey(entry.name, read) for read in skips_into(entry, layer) if read != layer)
    if layer not in entry.layers:
        return skips
    taken = entry.options.layer_inputs(entry.layers.index(layer))
    return (*skips, *(CarriedKey(entry.name, entry.layers[index], part) for index, part in taken))


def skips_into(entry: MemoryEntry, layer: int) -> tuple[int, ...]:
    """Return the layers at which a memory reads the input for results that are added behind `layer`."""
    return tuple(read for read, into in zip(entry.layers, entry.into, strict=False) if into == layer)
