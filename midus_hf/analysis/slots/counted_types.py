"""Which types of memory have something to count or to show: those that are registered, here or by another package, tell it."""

from midus_hf.config.plugins import load_offered
from midus_hf.memory.registry import MEMORY_MODULES


def types_with_slots() -> list[str]:
    """Sorted names of the types whose memories are a `RetrievesSlots`."""
    return _types_with("retrieve")


def types_whose_slots_add() -> list[str]:
    """Sorted names of the types whose memories are an `AddsSlots`."""
    return _types_with("slot_outputs")


def counted_types() -> list[str]:
    """Sorted names of the types of which `midus-usage` counts something: slots, chapters or blocks."""
    fetching = [name for name, module in MEMORY_MODULES.items() if "fetched" in module.asks]
    return sorted({*types_with_slots(), *_types_with("attention_mass"), *fetching})


def _types_with(method: str) -> list[str]:
    load_offered("midus_hf.memories", refuse=False)
    return sorted(name for name, module in MEMORY_MODULES.items() if hasattr(module, method))
