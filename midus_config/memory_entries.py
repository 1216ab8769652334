"""The `memory` list of a config: which memories a model has, and in which layers."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from midus_config.declared_tensors import DeclaredTensor
from midus_config.memory_types import MEMORY_TYPES, InsertedOptions, MemoryOptions, Site
from midus_config.model_sizes import ModelSizes
from midus_config.options import read_options

_PLACING_KEYS = ("type", "site", "layers")


@dataclass(frozen=True)
class MemoryEntry:
    """One entry of a config's `memory` list.

    Args:
        options: Of its type.
        site: Where the memory sits in its layers.
        layers: Indices of the layers that have it, ascending.
    """

    options: MemoryOptions
    site: Site
    layers: tuple[int, ...]

    @property
    def type(self) -> str:
        """The type of memory."""
        return self.options.type

    def to_dict(self) -> dict[str, Any]:
        """The entry as a config has it, every option written out."""
        return {"type": self.type, "site": self.site, **dataclasses.asdict(self.options), "layers": list(self.layers)}


@dataclass(frozen=True)
class Memories:
    """Every memory of a model.

    Args:
        entries: In the order of the config.
        sizes: Of the model.
    """

    entries: tuple[MemoryEntry, ...]
    sizes: ModelSizes

    @cached_property
    def inserted(self) -> dict[int, MemoryEntry]:
        """The entry of each layer that was inserted for a memory, by its index."""
        return {layer: entry for entry in self.entries if entry.site == "inserted" for layer in entry.layers}

    def layer_tensors(self, layer: int) -> dict[str, DeclaredTensor]:
        """The tensors that memories have in a layer, by their name within the layer."""
        entry = self.inserted.get(layer)
        if entry is None:
            return {}
        return {f"memory.{name}": tensor for name, tensor in entry.options.tensors(self.sizes).items()}

    def buffers(self, layer: int) -> set[str]:
        """Those of `layer_tensors` that are buffers and no parameters."""
        return {name for name, tensor in self.layer_tensors(layer).items() if tensor.role == "buffer"}


def inserted_options(entry: MemoryEntry) -> InsertedOptions:
    """The options of an entry whose site is `inserted`."""
    assert isinstance(entry.options, InsertedOptions)
    return entry.options


def read_memories(entries: Any, sizes: ModelSizes) -> Memories:
    """Read the `memory` list of a config.

    Args:
        entries: `[{"type": ..., "layers": [...], ...}, ...]`, or None for a model without memory. An entry may leave out its
            `site`, which is then the usual one of its type, and options, which then have their defaults.
        sizes: Of the model.

    Raises:
        ValueError: If it is no list of mappings, a type, a site or an option is unknown or a value refused, layers are absent,
            repeated, out of range or taken, or the memory does not fit the model.
    """
    if not isinstance(entries, list | None):
        raise ValueError(f"memory is {entries!r}; expected a list of entries, one per memory.")
    memories = Memories(tuple(_read_entry(entry, sizes) for entry in entries or []), sizes)
    taken: set[int] = set()
    for entry in memories.entries:
        for layer in entry.layers:
            if entry.site == "inserted" and layer in taken:
                raise ValueError(f"layer {layer} holds two inserted memories; expected at most one.")
        taken |= set(entry.layers)
    return memories


def _read_entry(values: Any, sizes: ModelSizes) -> MemoryEntry:
    if not isinstance(values, Mapping):
        raise ValueError(
            f"memory entry is {values!r}; expected a mapping such as {{'type': 'headwise', 'layers': [1]}}."
        )
    name = values.get("type")
    if not isinstance(name, str) or name not in MEMORY_TYPES:
        raise ValueError(
            f"memory type is {name!r}; expected one of: {', '.join(sorted(MEMORY_TYPES))}. A type is added, not renamed: "
            "under another name its tensors mean something else."
        )
    options_class = MEMORY_TYPES[name]
    given = {key: value for key, value in values.items() if key not in _PLACING_KEYS}
    options = read_options(options_class, given, f"memory entry of type {name!r}")
    site = values.get("site", options_class.sites[0])
    if site not in options_class.sites:
        raise ValueError(
            f"memory of type {name!r} has site = {site!r}; expected one of: {', '.join(options_class.sites)}."
        )
    options.check(sizes)
    return MemoryEntry(options, site, _read_layers(name, values, sizes.num_layers))


def _read_layers(name: str, values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    if "layers" not in values:
        raise ValueError(
            f"memory entry of type {name!r} has no 'layers'; expected the indices of the layers that hold it."
        )
    layers = values["layers"]
    if not isinstance(layers, list | tuple) or any(type(layer) is not int for layer in layers):
        raise ValueError(f"layers is {layers!r}; expected a list of layer indices.")
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"layers is {layers}; expected ascending indices, each once.")
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if outside:
        raise ValueError(f"memory of type {name!r} names layer {outside[0]}; expected 0 <= layer < {num_layers}.")
    return tuple(layers)
