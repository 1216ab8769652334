"""What a forward pass brings to memories beside hidden states."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from midus_hf.memory.registry import MemoryModule


class MemoryInputs:
    """What one forward pass of a model brings to its memories.

    It is made for one pass and travels through the layers as a keyword argument, so nothing of a pass is left on modules: two
    passes may run before one backward pass, and activation checkpointing repeats a layer with the same.

    Args:
        given: The keyword arguments of the model's forward that memories ask for. Default: none.
        tables: For each attached memory, the tables of each layer that shares some, by its index. Default: none.
    """

    def __init__(
        self,
        given: Mapping[str, Any] | None = None,
        tables: Mapping[str, Mapping[int, Mapping[str, torch.Tensor]]] | None = None,
    ):
        self._given, self._tables = given or {}, tables or {}
        self._carried: dict[tuple[str, int], torch.Tensor] = {}

    def of(self, memory_class: type[MemoryModule], name: str = "", layer: int = -1) -> dict[str, Any]:
        """The keyword arguments of a memory: those of its `inputs` that were given, and `tables` where it shares some.

        Args:
            memory_class: Of its module, which PEFT may have wrapped since.
            name: That it is attached by. Default: it is inserted.
            layer: That it is attached to.
        """
        inputs = {key: self._given[key] for key in memory_class.inputs if key in self._given}
        if layer in self._tables.get(name, {}):
            inputs["tables"] = self._tables[name][layer]
        return inputs

    def to(self, device: Any, non_blocking: bool = False) -> "MemoryInputs":
        """The same on another device: what accelerate asks for in front of a layer that lies on one of several."""

        def moved(value: Any) -> Any:
            return value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value

        given = {name: moved(value) for name, value in self._given.items()}
        tables = {
            name: {
                layer: {key: moved(table) for key, table in of_layer.items()} for layer, of_layer in by_layer.items()
            }
            for name, by_layer in self._tables.items()
        }
        copy = MemoryInputs(given, tables)
        copy._carried = self._carried
        return copy

    def carry(self, name: str, layer: int, output: torch.Tensor) -> None:
        """Keep what a memory read at a layer for the layer that adds it."""
        self._carried[name, layer] = output

    def carried(self, name: str, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """What a memory read at a layer.

        Args:
            name: Of the memory.
            layer: That it read at.
            hidden_states: What the layer that adds it was given: under reentrant activation checkpointing, nothing that is
                computed within a layer tells in the forward pass that a gradient is wanted. If it is the same layer, the gradient
                does not leave it, and what is computed within will do.

        Raises:
            ValueError: If no gradient would reach it.
        """
        if hidden_states.requires_grad and not torch.is_grad_enabled():
            raise ValueError(
                f"memory {name!r} reads at layer {layer} and adds behind another, and reentrant activation checkpointing loses the "
                "gradient between them; expected gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        return self._carried[name, layer].to(hidden_states.device)


def input_names(modules: Iterable[nn.Module]) -> set[str]:
    """The keyword arguments that the memories among modules ask for."""
    return {name for module in modules if isinstance(module, MemoryModule) for name in module.inputs}
