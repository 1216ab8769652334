"""Types of memory, one per file: options, tensors, checks and prices. Importing this package registers all types."""

import importlib
import pkgutil

from midus_hf.config.memory_types import MEMORY_TYPES

__all__ = ["MEMORY_TYPES"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
