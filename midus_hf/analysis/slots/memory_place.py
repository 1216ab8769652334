"""Where a memory of a model is."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from torch import nn


class MemoryPlace(NamedTuple):
    """A layer, and which of its memories.

    Args:
        layer: Index of the decoder layer.
        name: That the memory is attached by; empty where the layer was inserted for it.
    """

    layer: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.name}".rstrip()


def place_of(layer: int, path: str) -> MemoryPlace:
    """The place of a memory by the path of its module within its layer, whatever PEFT, FSDP or checkpointing have wrapped.

    Args:
        layer: Index of the decoder layer.
        path: Dotted, as `named_modules` of the layer has it.
    """
    parts = path.split(".")
    return MemoryPlace(layer, parts[parts.index("memories") + 1] if "memories" in parts else "")


def innermost(memory: nn.Module, kind: type) -> tuple[nn.Module, ...]:
    """The memory itself and every copy of it that PEFT has made; a wrapper, which has what it wraps, is none of them.

    Args:
        memory: In its layer, as a layer calls it.
        kind: What a memory is told by: a protocol of `midus_hf.memory.protocols`.
    """
    matching = [module for module in memory.modules() if isinstance(module, kind)]
    return tuple(
        module
        for module in matching
        if not any(isinstance(part, kind) for part in module.modules() if part is not module)
    )


class PlacedMemory(Protocol):
    """A memory in its layer."""

    @property
    def layer(self) -> int:
        """Index of the layer."""

    @property
    def name(self) -> str:
        """That the memory is attached by."""

    @property
    def memory(self) -> nn.Module:
        """Its module."""


P = TypeVar("P", bound=PlacedMemory)


def whole_and_named(found: Sequence[P], name: str | None) -> list[P]:
    """Those of one name, or all of them.

    Args:
        found: One or more.
        name: Of the memory; None for any.

    Raises:
        ValueError: If one is offloaded, or none has the name.
    """
    for placed in found:
        if any(parameter.device.type == "meta" for parameter in placed.memory.parameters()):
            raise ValueError(
                f"the memory of layer {placed.layer} is offloaded; expected its parameters on a device. Load the model whole."
            )
    names = dict.fromkeys(placed.name for placed in found)
    if name is not None and name not in names:
        raise ValueError(f"memory is {name!r}; expected one of: {', '.join(names)}.")
    return [placed for placed in found if name in (None, placed.name)]
