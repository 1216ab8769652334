"""Banks of blocks: parameters in files next to a checkpoint, of which each text fetches a few."""

from midus_hf.memories.hierarchical.bank.memory_bank import MemoryBank

__all__ = ["MemoryBank"]
