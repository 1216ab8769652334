"""Read memories from configs without importing torch or transformers: types, options, tensors and sites.

The package also holds what all other packages share: options in YAML, plugins, devices and phrases of error messages.

Importing this package registers every type of memory.
"""

from midus_hf.config import entry_checks as entry_checks
from midus_hf.config import memories
from midus_hf.config import memory_checks as memory_checks
from midus_hf.config.flops import memories as memory_flops  # noqa: F401  (registers the counts of every type)
from midus_hf.config.memory_types import MEMORY_TYPES

__all__ = ["MEMORY_TYPES", "memories"]
