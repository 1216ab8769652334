"""The `memory` list of a config: which memories a model has, and in which layers."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midus_hf.config.declared_tensors import DeclaredTensor
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.config.installed import INSTALLED, needed_for, not_carried
from midus_hf.config.memory_types import (
    MEMORY_TYPES,
    InsertedOptions,
    MemoryOptions,
    SharedTables,
    Site,
    is_name,
    known_type,
)
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import read_options

BASE_DIGEST = "base_sha256"
"""The key of a config's `upscale` entry that holds the SHA-256 of the weights which the model was upscaled from."""

INSERTED, ATTACHED, TABLES = "memory", "memories", "memory_tables"
"""What the names of tensors begin with: of an inserted memory and of attached ones, within their layer, each with its name; and of
tables that layers share, within the stack of layers, each with the name of its memory and a number."""


@dataclass(frozen=True)
class MemoryEntry:
    """One entry of a config's `memory` list.

    Args:
        options: Of its type.
        site: Where the memory sits in its layers.
        layers: Indices of the layers that have it, ascending.
        name: What its tensors are called by where it is attached to layers; unique in a model. Empty where it is inserted.
        into: For the site `skip`, the layer behind which each of `layers` adds to the residual stream.
    """

    options: MemoryOptions
    site: Site
    layers: tuple[int, ...]
    name: str = ""
    into: tuple[int, ...] = ()

    @property
    def type(self) -> str:
        """The type of memory."""
        return self.options.type

    @property
    def is_attached(self) -> bool:
        """Whether it is attached to layers, rather than having layers of its own."""
        return self.site != "inserted"

    def tensors_at(self, layer: int, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        """The tensors that it has in one of its layers."""
        return self.options.tensors_at(sizes, self.layers.index(layer), len(self.layers))

    @not_carried
    def to_dict(self) -> dict[str, Any]:
        """The entry as a config has it, every option written out."""
        return {
            "type": self.type,
            **({"name": self.name} if self.is_attached else {}),
            "site": self.site,
            **dataclasses.asdict(self.options),
            "layers": list(self.layers),
            **({"into": list(self.into)} if self.into else {}),
        }


@dataclass(frozen=True)
class Memories:
    """Every memory of a model.

    Args:
        entries: In the order of the config.
        sizes: Of the model.
        base: SHA-256 of the weights that the model was upscaled from; None where the config does not have it.
    """

    entries: tuple[MemoryEntry, ...]
    sizes: ModelSizes
    base: str | None = None

    @property
    def inserted(self) -> dict[int, MemoryEntry]:
        """The entry of each layer that was inserted for a memory, by its index."""
        return {layer: entry for entry in self.entries if not entry.is_attached for layer in entry.layers}

    @property
    def attached(self) -> dict[str, MemoryEntry]:
        """The entries of memories that are attached to layers, by their name."""
        return {entry.name: entry for entry in self.entries if entry.is_attached}

    @property
    @not_carried
    def reads_ahead(self) -> bool:
        """Whether one of them makes what a token gets depend on later tokens: then the model is not causal."""
        return any(entry.options.reads_ahead for entry in self.entries)

    @property
    @not_carried
    def reads_prompts(self) -> bool:
        """Whether one of them has to be told which tokens are a prompt."""
        return any(entry.options.reads_prompts for entry in self.entries)

    @property
    def carry(self) -> bool:
        """Whether layers give something for later ones."""
        return any(
            entry.into or entry.options.gives(index, len(entry.layers))
            for entry in self.attached.values()
            for index in range(len(entry.layers))
        )

    def attached_to(self, layer: int) -> list[MemoryEntry]:
        """The entries of the memories that are attached to a layer, in the order of the config."""
        return [entry for entry in self.attached.values() if layer in entry.layers]

    def layer_tensors(self, layer: int) -> dict[str, DeclaredTensor]:
        """The tensors that memories have in a layer, by their name within the layer."""
        tensors: dict[str, DeclaredTensor] = {}
        if layer in self.inserted:
            own = self.inserted[layer].tensors_at(layer, self.sizes)
            tensors = {f"{INSERTED}.{name}": tensor for name, tensor in own.items()}
        for entry in self.attached_to(layer):
            prefix = f"{ATTACHED}.{entry.name}"
            tensors |= {f"{prefix}.{name}": tensor for name, tensor in entry.tensors_at(layer, self.sizes).items()}
        return tensors

    def tables(self, name: str) -> tuple[SharedTables, ...]:
        """The tables that the layers of an attached memory share."""
        entry = self.attached[name]
        return entry.options.tables(self.sizes, entry.layers)

    @property
    @needed_for("banks")
    def banks(self) -> dict[str, BankLayout]:
        """How the bank of each memory lies in files that fetches blocks from one, by the name of the memory."""
        fetched = {name: entry.options.fetched(self.sizes) for name, entry in self.attached.items()}
        return {
            name: BankLayout(self.attached[name].type, self.attached[name].layers, blocks, self.base)
            for name, blocks in fetched.items()
            if blocks is not None
        }

    def table_tensors(self) -> dict[str, DeclaredTensor]:
        """The tensors of all tables, by their name within the stack of layers that holds them."""
        return {
            f"{TABLES}.{name}.{number}.{tensor_name}": tensor
            for name in self.attached
            for number, shared in enumerate(self.tables(name))
            for tensor_name, tensor in shared.tensors.items()
        }

    def buffers(self, layer: int) -> set[str]:
        """Those of `layer_tensors` that are buffers and no parameters."""
        return {name for name, tensor in self.layer_tensors(layer).items() if tensor.role == "buffer"}

    def table_buffers(self) -> set[str]:
        """Those of `table_tensors` that are buffers and no parameters."""
        return {name for name, tensor in self.table_tensors().items() if tensor.role == "buffer"}

    def free_name(self, memory_type: str) -> str:
        """A name for another attached memory: its type, with a number where that is taken."""
        names = (memory_type, *(f"{memory_type}-{number}" for number in range(2, len(self.attached) + 3)))
        return next(name for name in names if name not in self.attached)


NO_MEMORIES = Memories((), ModelSizes(hidden_size=0, num_heads=1))
"""Those of a model without memory, whatever its sizes."""


def inserted_options(entry: MemoryEntry) -> InsertedOptions:
    """The options of an entry whose site is `inserted`."""
    assert isinstance(entry.options, InsertedOptions)
    return entry.options


def base_digest(upscale_entry: Any) -> str | None:
    """Return the SHA-256 of the weights that a model was upscaled from.

    Args:
        upscale_entry: What the model's config has under `upscale`; None or anything else where it has no such entry.
    """
    digest = upscale_entry.get(BASE_DIGEST) if isinstance(upscale_entry, Mapping) else None
    return digest if isinstance(digest, str) else None


def memories_of(config: Any) -> Memories:
    """Read the `memory` list of a config as it is now.

    A model reads its config by this function and not by a method of the config: a serving engine may send the config to another
    process by value, and the classes that the config has there are copies of those that the code of the model tests for.

    Args:
        config: Of transformers, of a family that hosts memory.

    Raises:
        ValueError: If the list is not one that `read_memories` takes.
    """
    return read_memories(config.memory, ModelSizes.of(config), base_digest(getattr(config, "upscale", None)))


def read_memories(entries: Any, sizes: ModelSizes, base: str | None = None) -> Memories:
    """Read the `memory` list of a config.

    Args:
        entries: `[{"type": ..., "layers": [...], ...}, ...]`, or None for a model without memory. An entry may leave out its
            `site`, which is then the usual one of its type, its `name`, which is then its type, and options, which then have
            their defaults.
        sizes: Of the model.
        base: As in `Memories`. Default: None.

    Raises:
        ValueError: If it is no list of mappings, a type, a site or an option is unknown or a value refused, layers are absent,
            repeated, out of range or taken, a name is taken, or the memory does not fit the model.
    """
    if INSTALLED and not isinstance(entries, list | None):
        raise ValueError(f"memory is {entries!r}; expected a list of entries, one per memory.")
    memories = Memories(tuple(_read_entry(entry, sizes) for entry in entries or []), sizes, base)
    if INSTALLED:
        _check_memories(memories)
    return memories


def _check_memories(memories: Memories) -> None:
    _check_layers(memories)
    for name in memories.attached:
        _check_tables(name, memories.tables(name))
    _check_banks(memories.banks)
    names = [entry.name for entry in memories.entries if entry.is_attached]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"two memories have the name {repeated[0]!r}; expected a name of its own for each.")


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


def _read_entry(values: Any, sizes: ModelSizes) -> MemoryEntry:
    check_entry(values)
    memory_type = values["type"]
    options_class = MEMORY_TYPES[memory_type]
    site = values.get("site", options_class.sites[0])
    placing = {"type", "site", "layers"}
    if site != "inserted":
        placing.add("name")
    if site == "skip":
        placing.add("into")
    given = {key: value for key, value in values.items() if key not in placing}
    options = read_options(options_class, given, f"memory entry of type {memory_type!r}")
    name = "" if site == "inserted" else values.get("name", memory_type)
    if INSTALLED:
        _check_place(values, options, name, sizes)
    return MemoryEntry(options, site, tuple(values["layers"]), name, tuple(values.get("into", ())))


def check_entry(values: Any) -> None:
    """Refuse an entry whose type or site there is not.

    Raises:
        ValueError: If there is none.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"memory entry is {values!r}; expected a mapping such as {{'type': 'headwise', 'layers': [1]}}."
        )
    memory_type = values.get("type")
    if not isinstance(memory_type, str) or not known_type(memory_type):
        raise ValueError(
            f"memory type is {memory_type!r}; expected one of: {', '.join(sorted(MEMORY_TYPES))}. A type is added, not renamed: "
            "under another name its tensors mean something else. One of another package is known where that package is installed."
        )
    sites = MEMORY_TYPES[memory_type].sites
    site = values.get("site", sites[0])
    if site not in sites:
        raise ValueError(f"memory of type {memory_type!r} has site = {site!r}; expected one of: {', '.join(sites)}.")


def _check_place(values: Mapping[str, Any], options: MemoryOptions, name: Any, sizes: ModelSizes) -> None:
    """Refuse a memory that does not fit the model, layers that it cannot be in, or a name that it cannot have."""
    memory_type, site = options.type, values.get("site", options.sites[0])
    options.check(sizes)
    layers = _read_layers(memory_type, "layers", values, sizes.num_layers)
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"layers is {values['layers']}; expected ascending indices, each once.")
    options.check_layers(layers)
    if site == "inserted" and options.tables(sizes, layers):
        raise ValueError(
            f"memory of type {memory_type!r} is inserted, and its options make its layers share tables, which only memories do that "
            "are attached to layers; expected options that share none."
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
