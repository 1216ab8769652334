"""Which layers of a model read the depth, and which slots each of them reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accelerate.utils import extract_model_from_parallel
from torch import nn

from midus_hf.analysis.slots.memory_place import MemoryPlace, innermost, whole_and_named
from midus_hf.memory.protocols import AttendsToDepth


class ReadSlot(NamedTuple):
    """A slot that a layer reads.

    Args:
        layer: Index of the decoder layer that wrote it.
        source: What wrote it: `attention` or `ffn`.
    """

    layer: int
    source: str

    def __str__(self) -> str:
        return f"{self.layer} {self.source}"


@dataclass(frozen=True)
class DepthReader:
    """A layer that reads the depth.

    Args:
        layer: Index of the decoder layer.
        name: That the memory is attached by.
        slots: What it reads, from the oldest slot to the newest.
        num_heads: H.
        memory: The memory, or what PEFT has wrapped around it.
    """

    layer: int
    name: str
    slots: tuple[ReadSlot, ...]
    num_heads: int
    memory: Any

    @property
    def place(self) -> MemoryPlace:
        """The layer and the name."""
        return MemoryPlace(self.layer, self.name)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The memory itself, and every copy of it that PEFT has made: one of them is called."""
        return innermost(self.memory, AttendsToDepth)


def readers_of_depth(
    model: nn.Module, memory: str | None = None, layers: Sequence[int] | None = None
) -> list[DepthReader]:
    """The layers of a model that read the depth, in their order.

    Args:
        model: A causal language model whose decoder has `layers`, compiled or not, or what accelerate or PEFT has wrapped around
            one.
        memory: Name of one of several memories that read the depth. Default: all.
        layers: Some of them. Default: all.

    Raises:
        ValueError: If there is none, or none of that name, a layer reads no depth, or one is offloaded.
    """
    bare: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    blocks = enumerate(bare.get_decoder().layers)
    num_heads = bare.config.get_text_config().num_attention_heads
    found = [
        _reader(layer, block, num_heads)
        for layer, block in blocks
        if getattr(block, "depth", None) is not None and block.depth.slots
    ]
    if not found:
        raise ValueError(
            f"this {bare.config.model_type} model has no memory that reads the depth; expected one upscaled with method 'moda'."
        )
    found = whole_and_named(found, memory)
    if layers is None:
        return found
    there = [reader.layer for reader in found]
    for layer in layers:
        if layer not in there:
            raise ValueError(f"layer is {layer}; expected one that reads the depth: {', '.join(map(str, there))}.")
    return [reader for reader in found if reader.layer in layers]


def _reader(layer: int, block: Any, num_heads: int) -> DepthReader:
    depth = block.depth
    slots = tuple(ReadSlot(depth.layers[slot.writer], slot.source) for slot in depth.options.slots_read(depth.index))
    return DepthReader(layer, depth.name, slots, num_heads, block.memories[depth.name])
