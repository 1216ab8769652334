"""Parameters that live beside a checkpoint: banks of blocks, of which texts fetch some."""

from midus_hf.banks.memory_bank import MemoryBank

__all__ = ["MemoryBank"]
