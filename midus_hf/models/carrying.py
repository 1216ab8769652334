"""Tensors that a layer of a pass gives to later layers."""

from typing import Any

import torch

from midus_hf.config.memory_entries import Memories, MemoryEntry
from midus_hf.memory.needs import mixin_for
from midus_hf.models.memory_inputs import Carried, MemoryInputs


@mixin_for("skip", "depth")
class CarriesTensors:
    """Mixin for a host layer that takes tensors from earlier layers, and gives tensors to later layers."""

    # Tensors that the layer takes from earlier layers.
    takes: tuple[Carried, ...] = ()
    # Tensors that the layer gives to later layers.
    gives: tuple[Carried, ...] = ()
    # Tensors that no later layer takes.
    takes_last: tuple[Carried, ...] = ()
    # Whether the layer takes or gives any tensor.
    carries = False

    def host(self, config: Any, layer_idx: int, memories: Memories) -> None:
        """Build the memories that are attached to the layer, and set which tensors the layer takes and gives."""
        super().host(config, layer_idx, memories)
        attached = memories.attached.values()
        self.takes = tuple(carried for entry in attached for carried in taken_at(entry, layer_idx))
        self.gives = tuple(carried for entry in attached for carried in given_at(entry, layer_idx))
        self.takes_last = last_taken_at(memories, layer_idx)
        self.carries = bool(self.takes or self.gives)

    def __call__(
        self, hidden_states: torch.Tensor, *args: Any, memory_inputs: MemoryInputs | None = None, **kwargs: Any
    ) -> Any:
        """Call the layer with the tensors from earlier layers as inputs, and the tensors for later layers as outputs.

        So no layer changes `memory_inputs` while it runs, and both kinds of activation checkpointing treat these tensors as they
        treat hidden states.
        """
        call: Any = super().__call__
        if not self.carries:
            return call(hidden_states, *args, memory_inputs=memory_inputs, **kwargs)
        assert memory_inputs is not None, "a model whose layers carry something calls them with memory_inputs"
        taken = memory_inputs.carried(self.takes)
        output, *for_later = call(hidden_states, *taken, *args, memory_inputs=memory_inputs, **kwargs)
        memory_inputs.carry(self.gives, for_later)
        memory_inputs.release(self.takes_last)
        return output

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns; if it takes or gives tensors, a tuple of this and the tensors given, in their order.

        Args:
            hidden_states: The residual stream before this layer, `[B, T, D]`.
            args: Tensors from earlier layers, in the order of `takes`, then other arguments of the layer's forward.
            kwargs: Other arguments of the layer's forward.
        """
        if not self.carries:
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


def last_taken_at(memories: Memories, layer: int) -> tuple[Carried, ...]:
    """Return the tensors that a layer gives or takes, and that no later layer takes."""
    return tuple(
        carried
        for entry in memories.attached.values()
        for carried in (*taken_at(entry, layer), *given_at(entry, layer))
        if not any(carried in taken_at(entry, later) for later in range(layer + 1, memories.sizes.num_layers))
    )
