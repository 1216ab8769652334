"""Where the memories of chapters of a model are."""

from dataclasses import dataclass
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import nn

from midus_hf.analysis.slots.memory_place import MemoryPlace, innermost, whole_and_named
from midus_hf.memory.protocols import ReadsChapters


@dataclass(frozen=True)
class HostedChapters:
    """A memory of chapters in a layer.

    Args:
        layer: Index of the decoder layer.
        name: That the memory is attached by.
        block: The decoder layer.
        memory: The memory, or what PEFT has wrapped around it.
        modules: The memory itself, and every copy of it that PEFT has made: one of them is called.
    """

    layer: int
    name: str
    block: Any
    memory: Any
    modules: tuple[Any, ...]

    @property
    def place(self) -> MemoryPlace:
        """The layer and the name."""
        return MemoryPlace(self.layer, self.name)

    @property
    def num_chapters(self) -> int:
        """C, shared ones included."""
        return self.modules[0].num_chapters

    @property
    def num_shared(self) -> int:
        """S, the first chapters, which every token reads."""
        return self.modules[0].num_shared


def memories_of_chapters(model: nn.Module, name: str | None = None) -> list[HostedChapters]:
    """The memories of a model that read chapters, by layer.

    Args:
        model: A causal language model whose decoder has `layers`, compiled or not, or what accelerate or PEFT has wrapped around
            one.
        name: Of one of several memories of chapters. Default: all.

    Raises:
        ValueError: If there is none, or none of that name, or one is offloaded.
    """
    bare: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    found = [
        HostedChapters(layer, attached, block, memory, modules)
        for layer, block in enumerate(bare.get_decoder().layers)
        for attached, memory in getattr(block, "memories", {}).items()
        if (modules := innermost(memory, ReadsChapters))
    ]
    if not found:
        raise ValueError(
            f"this {bare.config.model_type} model has no memory of chapters; expected one upscaled with such a memory."
        )
    return whole_and_named(found, name)


def one_memory(model: nn.Module, name: str | None = None) -> list[HostedChapters]:
    """The layers of one memory of chapters.

    Args:
        model: As for `memories_of_chapters`.
        name: Of the memory. Default: the only one.

    Raises:
        ValueError: As `memories_of_chapters`, and if there are several and none is named.
    """
    found = memories_of_chapters(model, name)
    names = dict.fromkeys(hosted.name for hosted in found)
    if len(names) > 1:
        raise ValueError(f"the model has memories of chapters {', '.join(names)}; expected one of them. Pass memory.")
    return found
