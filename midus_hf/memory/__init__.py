"""Memory layers, one per file. Importing this package registers all of them."""

import importlib
import pkgutil

from midus_hf.memory.kept_values import kept_values
from midus_hf.memory.quantise import quantise_tables
from midus_hf.memory.registry import MEMORY_MODULES, MemoryModule, build_memory, register_memory

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["MEMORY_MODULES", "MemoryModule", "build_memory", "kept_values", "quantise_tables", "register_memory"]
