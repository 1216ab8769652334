"""The registry of memories: options by type, layers by options; and the `memory` list of a config.

A memory is a Python package: `options.py`, readable without torch, registers the options and FLOPs of a type; `layer.py` has the
layer, imported when a model is built. The entry point `midus_hf.memories` of another package names such a folder, whose import
registers the options.
"""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from midus_hf.anatomy.record import record_entry
from midus_hf.config.declared_tensors import DeclaredTensor, ModelSizes, Role
from midus_hf.config.errors import RequestError
from midus_hf.config.options import read_options
from midus_hf.config.plugins import is_same_class, load_plugins
from midus_hf.memories.options import SITES, MemoryOptions, SharedTables, SiteName, is_name

Options = TypeVar("Options", bound=MemoryOptions)
Layer = TypeVar("Layer", bound=type)

#: Options classes of the registered types, by type. Types of other packages are added when `memory_type` looks for one.
MEMORY_TYPES: dict[str, type[MemoryOptions]] = {}

# Types in checkpoints from before types had the names of their methods.
_EARLIER_TYPES = {
    "chapters": "moc",
    "depth-attention": "moda",
    "headwise": "midus-hml",
    "linear": "midus-linear",
    "ngram": "engram",
    "product-key": "midus-pkm",
    "ultramem": "ultramem-v2",
}
_ENTRY_KEYS = frozenset({"type", "name", "site", "layers", "into", "span"})
_ROLES: tuple[Role, ...] = get_args(Role)
_SAMPLE = ModelSizes(hidden_size=64, num_heads=4, intermediate_size=128, num_layers=4)
# Options for the bits of tables of integers, which checkpoints of earlier commits have; null where tables were not rounded.
_BITS = ("value_bits", "bank_bits")

# In tensor names: `memory` and `memories.NAME` in a layer, `memory_tables.NAME.NUMBER` in the stack of layers.
INSERTED, ATTACHED, TABLES = "memory", "memories", "memory_tables"


def register_memory(name: str, default_name: str | None = None) -> Callable[[type[Options]], type[Options]]:
    """Return a decorator that registers the options of a memory under the `type` that configs name.

    The name, lower case words joined by hyphens, is no other class's; `default_name`, by default equal, names an attached memory in
    names of tensors. `check_declaration` may refuse the class.
    """
    if not is_name(name) or name != name.lower():
        raise RequestError(
            f"memory type is {name!r}; expected lower case words joined by hyphens, and no word of a torch module."
        )

    def decorate(cls: type[Options]) -> type[Options]:
        taken = MEMORY_TYPES.get(name)
        if taken is not None and not is_same_class(taken, cls):
            raise RequestError(f"memory type {name!r} is already registered by {taken.__name__}; choose another name.")
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:  # a test checks the types of this package
            check_declaration(name, cls)
        cls.type, cls.default_name = name, default_name or name
        MEMORY_TYPES[name] = cls
        return cls

    return decorate


def register_layer(options_class: type[MemoryOptions]) -> Callable[[Layer], Layer]:
    """Return a decorator that makes a class the only layer of a memory, found by the memory's options."""

    def decorate(cls: Layer) -> Layer:
        taken = vars(options_class).get("layer")
        if taken is not None and not is_same_class(taken, cls):
            raise RequestError(
                f"{options_class.__name__} already has the layer {taken.__name__}; choose other options."
            )
        options_class.layer = cls
        return cls

    return decorate


def layer_class(options: MemoryOptions, attention: str | None = None) -> Any:
    """Return the class of a memory's layer, importing its module `layer`, or raise a `RequestError`.

    For the implementation of attention "vllm" it is `paged_layer` of the options, if they have one.
    """
    options_class = type(options)
    if attention == "vllm" and (paged := options_class.paged_layer()) is not None:
        return paged
    if vars(options_class).get("layer") is None:  # a subclass has a separate layer
        import_beside(options_class.__module__, "layer")
    if vars(options_class).get("layer") is None:
        raise RequestError(
            f"memory type {options.type!r} has no layer; expected one in the module 'layer' next to {options_class.__name__}, "
            f"with the decorator register_layer({options_class.__name__})."
        )
    return options_class.layer


@functools.cache
def import_beside(module: str, name: str) -> None:
    """Import the module `name` in the folder of a module, such as that of options, if there is one."""
    package = module.rpartition(".")[0]
    if package and importlib.util.find_spec(f"{package}.{name}") is not None:
        importlib.import_module(f"{package}.{name}")


def memory_type(name: Any) -> type[MemoryOptions]:
    """Return the options class of a type of memory, of any package, or raise a `RequestError`."""
    if isinstance(name, str):
        name = _EARLIER_TYPES.get(name, name)
        if name not in MEMORY_TYPES:
            load_plugins("midus_hf.memories")
    if not isinstance(name, str) or name not in MEMORY_TYPES:
        raise RequestError(
            f"memory type is {name!r}; expected one of: {', '.join(sorted(MEMORY_TYPES))}. Do not rename a type, "
            "since tensors mean something else under another type. A type of another package is known only where it is installed."
        )
    return MEMORY_TYPES[name]


def sample_tensors(options_class: type[MemoryOptions]) -> list[tuple[str, DeclaredTensor]]:
    """Return the tensors that default options declare for a layer and for tables of an example model."""
    options = options_class()
    tables = options.tables(_SAMPLE, tuple(range(_SAMPLE.num_layers)))
    return [*options.tensors(_SAMPLE).items(), *(item for shared in tables for item in shared.tensors.items())]


def check_declaration(name: str, cls: type[MemoryOptions]) -> None:
    """Refuse a class whose sites, options, roles or dtypes would silently mean something else."""
    if not cls.sites or any(site not in SITES for site in cls.sites):
        raise RequestError(
            f"memory type {name!r} has sites = {cls.sites}; expected one or more of {', '.join(SITES)}."
        )
    taken = sorted(_ENTRY_KEYS & {field.name for field in dataclasses.fields(cls)})
    if taken:
        raise RequestError(
            f"memory type {name!r} has the option {taken[0]!r}, which says what or where a memory is; choose another name."
        )
    for tensor_name, tensor in sample_tensors(cls):
        is_buffer, given = tensor.role == "buffer", f"the role {tensor.role!r}"
        if tensor.role not in _ROLES:
            expected = f"one of {', '.join(_ROLES)}"
        elif is_buffer and "." in tensor_name:
            expected = "a parameter: linear layers have no buffers"
        elif tensor.dtype and not is_buffer:
            given, expected = f"{given} and the dtype {tensor.dtype}", "the role 'buffer', since integers do not train"
        else:
            continue
        raise RequestError(f"memory type {name!r} gives {tensor_name} {given}; expected {expected}.")


@dataclass(frozen=True)
class MemoryEntry:
    """One entry of a config's `memory` list."""

    options: MemoryOptions
    site: SiteName
    layers: tuple[int, ...]  # indices, ascending
    name: str = ""  # of an attached memory in the names of its tensors, unique in a model
    into: tuple[int, ...] = ()  # for the site `skip`, for each of `layers` the layer after which the memory adds

    @property
    def is_attached(self) -> bool:
        """True if the memory is attached to layers of the base, False if layers were inserted for the memory."""
        return self.site != "inserted"

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


def tensors_in_layer(entry: MemoryEntry, layer: int, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
    """Return the tensors by name that a memory has in one of its layers."""
    return entry.options.tensors_at(sizes.at(layer), entry.layers.index(layer), len(entry.layers))


@dataclass(frozen=True)
class Memories:
    """A model's memories, in the config's order; `base`: SHA-256 of the base's weights, None if unknown."""

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

    def attached_to(self, layer: int) -> list[MemoryEntry]:
        """Return the entries of the memories that are attached to a layer, in the order of the config."""
        return [entry for entry in self.attached.values() if layer in entry.layers]

    def tables(self, name: str) -> tuple[SharedTables, ...]:
        """Return the tables that the layers of an attached memory share."""
        entry = self.attached[name]
        return entry.options.tables(self.sizes, entry.layers)


# Memories of a model without memory. The sizes in it are arbitrary.
NO_MEMORIES = Memories((), ModelSizes(hidden_size=0, num_heads=1))


def are_causal(memories: Memories) -> bool:
    """Return whether no memory lets a token depend on later tokens."""
    return not any(entry.options.reads_ahead for entry in memories.entries)


def memories_of(config: Any) -> Memories:
    """Read the current `memory` list of a config of transformers, or of a composite model's config.

    Not a method: a serving engine may pickle the config by value, and copied classes fail `isinstance` tests in the model's code.
    """
    config = config.get_text_config()
    digest = record_entry(config).get("base_sha256")
    return read_memories(config.memory, ModelSizes.from_config(config), digest if isinstance(digest, str) else None)


def read_memories(entries: Any, sizes: ModelSizes, base: str | None = None) -> Memories:
    """Read a config's `memory`, `[{"type": ..., "layers": [...], ...}, ...]` or None, or raise a `RequestError`.

    An entry may leave out `site` (default: the first of the type), `name` (default: that of the type) and any option.
    """
    read = []
    for values in map(check_entry, entries or []):
        options_class, subject = memory_type(values["type"]), f"memory entry of type {values['type']!r}"
        site = values.get("site", options_class.sites[0])
        placing = {"type", "site", "layers", "" if site == "inserted" else "name", "into" if site == "skip" else ""}
        option_values = {key: value for key, value in values.items() if key not in placing}
        options = read_options(options_class, option_values, subject)
        name = "" if site == "inserted" else values.get("name", options_class.default_name)
        check_place(options, values, name, sizes)
        read.append(MemoryEntry(options, site, tuple(values["layers"]), name, tuple(values.get("into", ()))))
    memories = Memories(tuple(read), sizes, base)
    check_memories(memories)
    return memories


def check_entry(values: Any) -> dict[str, Any]:
    """Return an entry without null `_BITS`; refuse one without a known type and a site that it can take."""
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
    for key in _BITS:
        if values.get(key) is not None:
            raise RequestError(
                f"memory entry of type {values['type']!r} has {key} = {values[key]!r}: its values are integers, no longer read; "
                "expected values that train. Load the checkpoint that was rounded, or make it anew."
            )
    return {key: value for key, value in values.items() if key not in _BITS}


def check_memories(memories: Memories) -> None:
    """Refuse memories that take layers or names twice, or have banks of several trees."""
    inserted: set[int] = set()
    for entry in memories.entries:
        if not entry.is_attached:
            twice = inserted & set(entry.layers)
            if twice:
                raise RequestError(f"layer {min(twice)} holds two inserted memories; expected at most one.")
            inserted |= set(entry.layers)
    names = [entry.name for entry in memories.entries if entry.is_attached]
    attends: dict[int, str] = {}
    before: dict[str, MemoryOptions] = {}
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
                "as both, and let layers read segments of it."
            )
        entry.options.check_beside(name, before)
        before[name] = entry.options
        if names.count(name) > 1:
            raise RequestError(f"two memories have the name {name!r}; expected a separate name for each.")


def check_place(options: MemoryOptions, values: Mapping[str, Any], name: Any, sizes: ModelSizes) -> None:
    """Refuse a memory that does not fit the model, or wrong layers or a wrong name (inserted: empty)."""
    type_name, site = options.type, values.get("site", options.sites[0])
    options.check_fit(sizes)
    for key, wanted in (
        ("layers", "the indices of the layers that hold it"),
        *([("into", "a layer to add after for each of its layers")] if site == "skip" else []),
    ):
        if key not in values:
            raise RequestError(f"memory entry of type {type_name!r} has no {key!r}; expected {wanted}.")
        if not isinstance(values[key], list | tuple) or any(type(layer) is not int for layer in values[key]):
            raise RequestError(f"{key} is {values[key]!r}; expected a list of layer indices.")
        outside = [layer for layer in values[key] if not 0 <= layer < sizes.num_layers]
        if outside:
            raise RequestError(
                f"memory of type {type_name!r} names layer {outside[0]}; expected 0 <= layer < {sizes.num_layers}."
            )
    layers, into = tuple(values["layers"]), values.get("into", ()) if site == "skip" else ()
    if list(layers) != sorted(set(layers)):
        raise RequestError(f"layers is {values['layers']}; expected ascending indices, each once.")
    options.check_layers(layers)
    if not isinstance(name, str) or (site != "inserted" and not is_name(name)):
        raise RequestError(
            f"memory of type {type_name!r} has name = {name!r}; expected words joined by hyphens, and no word of a torch "
            "module."
        )
    if site == "skip" and (len(into) != len(layers) or any(to < at for at, to in zip(layers, into, strict=True))):
        raise RequestError(
            f"memory of type {type_name!r} reads at layers {list(layers)} and adds after {list(into)}; expected for each a layer to "
            "add after, at or after it."
        )
