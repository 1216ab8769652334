"""The `memory` list of a config: which memories a model has, and in which layers."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midus_hf.anatomy.record import recorded_base_sha256
from midus_hf.config.declared_tensors import DeclaredTensor
from midus_hf.config.errors import RequestError
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import read_options
from midus_hf.memories.options import MemoryOptions, SharedTables, SiteName, is_name
from midus_hf.memories.registry import memory_type

# Options for the bits of tables that midus-hf 0.1.0 rounded to integers; null where tables were not.
_BITS = ("value_bits", "bank_bits")

# First part of tensor names. Within a layer: `memory` for an inserted memory, `memories.NAME` for an attached one.
# Within the stack of layers: `memory_tables.NAME.NUMBER` for the tables that layers share.
INSERTED, ATTACHED, TABLES = "memory", "memories", "memory_tables"


@dataclass(frozen=True)
class MemoryEntry:
    """One entry of a config's `memory` list.

    Args:
        options: Options of the memory, of the class of its type.
        site: Position of the memory in its layers.
        layers: Indices of the layers that have the memory, ascending.
        name: Name of an attached memory in the names of its tensors, unique in a model. Default: empty, for an inserted
            memory.
        into: For the site `skip`, one index for each of `layers`: the layer after which the memory adds to the residual
            stream. Default: empty, for every other site.
    """

    options: MemoryOptions
    site: SiteName
    layers: tuple[int, ...]
    name: str = ""
    into: tuple[int, ...] = ()

    @property
    def is_attached(self) -> bool:
        """True if the memory is attached to layers of the base, False if layers were inserted for the memory."""
        return self.site != "inserted"

    def tensors_at(self, layer: int, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        """Return the tensors by name that the memory has in one of its layers."""
        return self.options.tensors_at(sizes.at(layer), self.layers.index(layer), len(self.layers))

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in the form of a config, with every option written out."""
        return {
            "type": self.options.type,
            **({"name": self.name} if self.is_attached else {}),
            "site": self.site,
            **dataclasses.asdict(self.options),
            "layers": list(self.layers),
            **({"into": list(self.into)} if self.into else {}),
        }


@dataclass(frozen=True)
class Memories:
    """All memories of a model.

    Args:
        entries: One entry per memory, in the order of the config.
        sizes: Sizes of the model.
        base: SHA-256 of the weights that the model was upscaled from. Default: None, unknown.
    """

    entries: tuple[MemoryEntry, ...]
    sizes: ModelSizes
    base: str | None = None

    @property
    def inserted(self) -> dict[int, MemoryEntry]:
        """Entries by layer index, for the layers that were inserted for a memory."""
        return {layer: entry for entry in self.entries if not entry.is_attached for layer in entry.layers}

    @property
    def attached(self) -> dict[str, MemoryEntry]:
        """Entries of the attached memories, by name."""
        return {entry.name: entry for entry in self.entries if entry.is_attached}

    @property
    def reads_ahead(self) -> bool:
        """True if a memory lets a token depend on later tokens. The model is then not causal."""
        return any(entry.options.reads_ahead for entry in self.entries)

    def attached_to(self, layer: int) -> list[MemoryEntry]:
        """Return the entries of the memories that are attached to a layer, in the order of the config."""
        return [entry for entry in self.attached.values() if layer in entry.layers]

    def tables(self, name: str) -> tuple[SharedTables, ...]:
        """Return the tables that the layers of an attached memory share."""
        entry = self.attached[name]
        return entry.options.tables(self.sizes, entry.layers)


# Memories of a model without memory. The sizes in it are arbitrary.
NO_MEMORIES = Memories((), ModelSizes(hidden_size=0, num_heads=1))


def memories_of(config: Any) -> Memories:
    """Read the current `memory` list of a config.

    This is not a method of the config, since a serving engine may pickle the config by value to another process, where instances
    belong to copied classes, for which `isinstance` tests in the model's code fail.

    Args:
        config: Config object of transformers, of a family that hosts memory, or of a composite model around one.

    Raises:
        RequestError: If `read_memories` refuses the list.
    """
    config = config.get_text_config()
    return read_memories(config.memory, ModelSizes.from_config(config), recorded_base_sha256(config))


def read_memories(entries: Any, sizes: ModelSizes, base: str | None = None) -> Memories:
    """Read the `memory` list of a config.

    Args:
        entries: `[{"type": ..., "layers": [...], ...}, ...]`, or None for a model without memory. An entry may leave
            out `site` (default: the first site of the type), `name` (default: that of the type) and any option.
        sizes: Sizes of the model.
        base: SHA-256 of the weights that the model was upscaled from. Default: None, unknown.

    Raises:
        RequestError: If an entry is not a mapping; if a type, site or option is unknown or a value is refused;
            if layers are missing, repeated, out of range or taken; if a name is taken; or if a memory does not fit the
            model.
    """
    memories = Memories(tuple(_read_entry(entry, sizes) for entry in entries or []), sizes, base)
    check_memories(memories)
    return memories


def _read_entry(values: Any, sizes: ModelSizes) -> MemoryEntry:
    check_entry(values)
    options_class = memory_type(values["type"])
    site = values.get("site", options_class.sites[0])
    placing = {"type", "site", "layers"}
    if site != "inserted":
        placing.add("name")
    if site == "skip":
        placing.add("into")
    for key in _BITS:
        if values.get(key) is not None:
            raise RequestError(
                f"memory entry of type {values['type']!r} has {key} = {values[key]!r}: its values are integers, no longer read; "
                "expected values that train. Load the checkpoint that was rounded, or make it anew."
            )
    option_values = {key: value for key, value in values.items() if key not in placing and key not in _BITS}
    options = read_options(options_class, option_values, f"memory entry of type {values['type']!r}")
    name = "" if site == "inserted" else values.get("name", options_class.default_name)
    check_place(options, values, name, sizes)
    return MemoryEntry(options, site, tuple(values["layers"]), name, tuple(values.get("into", ())))


def check_entry(values: Any) -> None:
    """Check that an entry is a mapping with a known type and a site that the type can take.

    Raises:
        RequestError: If the entry is not.
    """
    if not isinstance(values, Mapping):
        raise RequestError(
            f"memory entry is {values!r}; expected a mapping such as {{'type': 'midus-hml', 'layers': [1]}}."
        )
    sites = memory_type(values.get("type")).sites
    site = values.get("site", sites[0])
    if site not in sites:
        raise RequestError(
            f"memory of type {values['type']!r} has site = {site!r}; expected one of: {', '.join(sites)}."
        )


def check_memories(memories: Memories) -> None:
    """Refuse memories that cannot be combined: if layers or names are taken twice, or banks have several trees."""
    inserted: set[int] = set()
    for entry in memories.entries:
        if not entry.is_attached:
            twice = inserted & set(entry.layers)
            if twice:
                raise RequestError(f"layer {min(twice)} holds two inserted memories; expected at most one.")
            inserted |= set(entry.layers)
    attends: dict[int, str] = {}
    for name, entry in memories.attached.items():
        for layer in entry.layers if entry.options.attends else ():
            if layer in attends:
                raise RequestError(
                    f"memories {attends[layer]!r} and {name!r} both attend in the place of layer {layer}'s own attention; "
                    "expected at most one. Give them other layers."
                )
            attends[layer] = name
        on_inserted = inserted & {*entry.layers, *entry.into}
        if on_inserted:
            raise RequestError(
                f"memory {name!r} is attached to layer {min(on_inserted)}, which was inserted for a memory; expected layers of the "
                "base, which have a feed-forward network."
            )
        readers = [layer for shared in memories.tables(name) for layer in shared.layers]
        twice = {layer for layer in readers if readers.count(layer) > 1}
        if twice:
            raise RequestError(
                f"layer {min(twice)} reads two shared tables of memory {name!r}; expected at most one. Declare one that is as long "
                "as both, of which layers read segments."
            )
    before: dict[str, MemoryOptions] = {}
    for name, entry in memories.attached.items():
        entry.options.check_beside(name, before)
        before[name] = entry.options
    names = [entry.name for entry in memories.entries if entry.is_attached]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise RequestError(f"two memories have the name {repeated[0]!r}; expected a separate name for each.")


def check_place(options: MemoryOptions, values: Mapping[str, Any], name: Any, sizes: ModelSizes) -> None:
    """Refuse a memory that does not fit the model, or an entry with wrong layers or a wrong name.

    Args:
        options: Options of the entry.
        values: Keys of the entry as the config has them, `type`, `site` and `layers` among them.
        name: Name of the memory; empty for an inserted memory.
        sizes: Sizes of the model.
    """
    type_name, site = options.type, values.get("site", options.sites[0])
    options.check_fit(sizes)
    layers = _read_layers(type_name, "layers", values, sizes.num_layers)
    if list(layers) != sorted(set(layers)):
        raise RequestError(f"layers is {values['layers']}; expected ascending indices, each once.")
    options.check_layers(layers)
    if not isinstance(name, str) or (site != "inserted" and not is_name(name)):
        raise RequestError(
            f"memory of type {type_name!r} has name = {name!r}; expected words joined by hyphens, and no word of a torch "
            "module."
        )
    into = _read_layers(type_name, "into", values, sizes.num_layers) if site == "skip" else ()
    if site == "skip" and (len(into) != len(layers) or any(to < at for at, to in zip(layers, into, strict=True))):
        raise RequestError(
            f"memory of type {type_name!r} reads at layers {list(layers)} and adds behind {list(into)}; expected a layer to add "
            "behind for each, at or after it."
        )


def _read_layers(type_name: str, key: str, values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    if key not in values:
        wanted = (
            "the indices of the layers that hold it"
            if key == "layers"
            else "a layer to add behind for each of its layers"
        )
        raise RequestError(f"memory entry of type {type_name!r} has no {key!r}; expected {wanted}.")
    layers = values[key]
    if not isinstance(layers, list | tuple) or any(type(layer) is not int for layer in layers):
        raise RequestError(f"{key} is {layers!r}; expected a list of layer indices.")
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if outside:
        raise RequestError(
            f"memory of type {type_name!r} names layer {outside[0]}; expected 0 <= layer < {num_layers}."
        )
    return tuple(layers)
