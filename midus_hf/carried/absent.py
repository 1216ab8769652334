"""Stand-ins for classes that a checkpoint without attached or inserted memories does not need."""

from midus_hf.memories.hosting.parts import LayerNames


class HostLayer(LayerNames):
    """Stands for a layer with attached memories, which this checkpoint does not have."""


class MemoryBlock(LayerNames):
    """Stands for a layer that was inserted for a memory, which this checkpoint does not have."""
