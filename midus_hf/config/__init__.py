"""What configs say of memories, readable without torch and transformers: types, options, tensors, sites.

Beside it, what all rooms share: options in YAML, what other packages offer, devices, words of refusals.

Importing this package registers every type of memory.
"""

from midus_hf.config import memories
from midus_hf.config.memory_types import MEMORY_TYPES

__all__ = ["MEMORY_TYPES", "memories"]
