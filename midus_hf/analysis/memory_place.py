"""Where a memory of a model is."""

from typing import NamedTuple


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
