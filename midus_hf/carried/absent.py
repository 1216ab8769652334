"""Stand for classes that the code of a checkpoint does not need: layers without attached memories, or without inserted ones."""

from midus_hf.memories.hosting.parts import LayerNames


class HostLayer(LayerNames):
    """Stands for a layer with attached memories, which this checkpoint does not have."""


class MemoryBlock(LayerNames):
    """Stands for a layer that was inserted for a memory, which this checkpoint does not have."""
