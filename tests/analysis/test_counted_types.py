"""The types that refusals list are those that are registered, by what their memories can tell."""

from midus_hf.analysis.slots.usage import counted_types, types_whose_slots_add, types_with_slots
from midus_hf.config.memory_types import MEMORY_TYPES
from midus_hf.memory.registry import MEMORY_MODULES

SLOTS = {"headwise", "linear", "product-key", "ultramem"}


def test_chapters_and_fetched_blocks_are_counted_beside_slots():
    ours = {name for name, options in MEMORY_TYPES.items() if options.__module__.startswith("midus_hf.config.")}
    assert ours & set(types_with_slots()) == ours & set(types_whose_slots_add()) == SLOTS
    assert ours & set(counted_types()) == ours - {"depth-attention"}


def test_a_type_of_another_package_is_listed_where_it_belongs(monkeypatch):
    monkeypatch.setitem(MEMORY_MODULES, "another", MEMORY_MODULES["linear"])
    monkeypatch.setitem(MEMORY_MODULES, "mute", MEMORY_MODULES["depth-attention"])
    for types in (counted_types(), types_with_slots(), types_whose_slots_add()):
        assert "another" in types and "mute" not in types
        assert types == sorted(types)
