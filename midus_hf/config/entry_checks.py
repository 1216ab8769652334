"""Checks of the `memory` list of a config: layers, names and banks of all memories together, and each memory's place."""

from collections.abc import Mapping
from typing import Any

from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.config.memory_checks import check_layers
from midus_hf.config.memory_entries import Memories, check_memories, check_place
from midus_hf.config.memory_types import MemoryOptions, SharedTables, check_fit, is_name
from midus_hf.config.model_sizes import ModelSizes


@check_memories.register
def _(memories: Memories) -> None:
    _check_layers(memories)
    for name in memories.attached:
        _check_tables(name, memories.tables(name))
    _check_banks(memories.banks)
    names = [entry.name for entry in memories.entries if entry.is_attached]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"two memories have the name {repeated[0]!r}; expected a separate name for each.")


def _check_layers(memories: Memories) -> None:
    inserted: set[int] = set()
    for entry in memories.entries:
        if not entry.is_attached:
            twice = inserted & set(entry.layers)
            if twice:
                raise ValueError(f"layer {min(twice)} holds two inserted memories; expected at most one.")
            inserted |= set(entry.layers)
    attends: dict[int, str] = {}
    for entry in memories.attached.values():
        for layer in entry.layers if entry.options.attends else ():
            if layer in attends:
                raise ValueError(
                    f"memories {attends[layer]!r} and {entry.name!r} both attend in the place of layer {layer}'s own attention; "
                    "expected at most one. Give them other layers."
                )
            attends[layer] = entry.name
        own = inserted & {*entry.layers, *entry.into}
        if own:
            raise ValueError(
                f"memory {entry.name!r} is attached to layer {min(own)}, which was inserted for a memory; expected layers of the "
                "base, which have a feed-forward network."
            )


def _check_banks(banks: Mapping[str, BankLayout]) -> None:
    trees = {name: (layout.blocks.branching, layout.num_levels) for name, layout in banks.items()}
    for name, tree in trees.items():
        first, expected = next(iter(trees.items()))
        if tree != expected:
            raise ValueError(
                f"memory {name!r} fetches blocks by a tree of branching {tree[0]} and {tree[1]} levels, and {first!r} by one of "
                f"branching {expected[0]} and {expected[1]} levels; expected one tree, by whose nodes a text fetches from both."
            )


def _check_tables(name: str, tables: tuple[SharedTables, ...]) -> None:
    readers = [layer for shared in tables for layer in shared.layers]
    twice = [layer for layer in readers if readers.count(layer) > 1]
    if twice:
        raise ValueError(
            f"layer {twice[0]} reads two shared tables of memory {name!r}; expected at most one. Declare one that is as long as "
            "both, of which layers read stretches."
        )


@check_place.register
def _(options: MemoryOptions, values: Mapping[str, Any], name: Any, sizes: ModelSizes) -> None:
    """Refuse a memory that does not fit the model, or an entry with wrong layers or a wrong name."""
    memory_type, site = options.type, values.get("site", options.sites[0])
    check_fit(options, sizes)
    layers = _read_layers(memory_type, "layers", values, sizes.num_layers)
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"layers is {values['layers']}; expected ascending indices, each once.")
    check_layers(options, layers)
    if site == "inserted" and options.tables(sizes, layers):
        raise ValueError(
            f"memory of type {memory_type!r} is inserted, and its options make its layers share tables, which only "
            "attached memories can do; expected options that share no tables."
        )
    if not isinstance(name, str) or (site != "inserted" and not is_name(name)):
        raise ValueError(
            f"memory of type {memory_type!r} has name = {name!r}; expected words joined by hyphens, and no word of a torch "
            "module."
        )
    into = _read_layers(memory_type, "into", values, sizes.num_layers) if site == "skip" else ()
    if site == "skip" and (len(into) != len(layers) or any(to < at for at, to in zip(layers, into, strict=True))):
        raise ValueError(
            f"memory of type {memory_type!r} reads at layers {list(layers)} and adds behind {list(into)}; expected a layer to add "
            "behind for each, at or after it."
        )


def _read_layers(memory_type: str, key: str, values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    if key not in values:
        what = (
            "the indices of the layers that hold it"
            if key == "layers"
            else "a layer to add behind for each of its layers"
        )
        raise ValueError(f"memory entry of type {memory_type!r} has no {key!r}; expected {what}.")
    layers = values[key]
    if not isinstance(layers, list | tuple) or any(type(layer) is not int for layer in layers):
        raise ValueError(f"{key} is {layers!r}; expected a list of layer indices.")
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if outside:
        raise ValueError(
            f"memory of type {memory_type!r} names layer {outside[0]}; expected 0 <= layer < {num_layers}."
        )
    return tuple(layers)
