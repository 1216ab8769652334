"""Entries of a `memory` list, read for a small model."""

from collections.abc import Mapping
from typing import Any

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.registry import MemoryEntry, read_memories

SIZES = ModelSizes(hidden_size=32, num_heads=4, intermediate_size=48, num_layers=6)


def read_entry(entry: Mapping[str, Any] | str) -> MemoryEntry:
    return read_memories([entry], SIZES).entries[0]
