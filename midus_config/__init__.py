"""What configs say of memories, readable without torch and transformers: types, options, tensors, sites.

Beside it, what all packages share about files, which belong to a checkpoint and how they are written whole, and about devices.

Importing this package registers every type of memory.
"""

from midus_config import memories
from midus_config.memory_types import MEMORY_TYPES

__all__ = ["MEMORY_TYPES", "memories"]
