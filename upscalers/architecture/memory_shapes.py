"""The tensors of each memory type, as far as planning needs to know them: names and shapes, from the raw config."""

from collections.abc import Callable
from typing import Any

from upscalers.architecture.families import ATTENTION_OUTPUT_ROLES, ATTENTION_ROLES, Config, Family, Shape
from upscalers.request.errors import RequestError

MemoryShapes = Callable[[Family, Config, Config], dict[str, Shape]]
MEMORY_SHAPES: dict[str, MemoryShapes] = {}

_BUFFERS = ("memory.query_mean", "memory.query_variance")


def memory_shapes(family: Family, config: Config, entry: Config) -> dict[str, Shape]:
    """Shapes of the tensors of one inserted memory, buffers included, by their name within the layer.

    Args:
        family: The family of the model.
        config: The raw `config.json`.
        entry: The memory's entry, `{"type": ..., ...}`.

    Raises:
        RequestError: If the type is unknown, or an option that decides a shape has no such value.
    """
    name = str(entry.get("type"))
    if name not in MEMORY_SHAPES:
        raise RequestError(
            f"memory type {name!r} is unknown; expected one of: {', '.join(MEMORY_SHAPES)}. A type is added (CONTRIBUTING.md), "
            "not renamed: under another name its tensors mean something else."
        )
    shapes = {**MEMORY_SHAPES[name](family, config, entry), **_norm_and_gate(family, config, entry)}
    return {f"memory.{key}": shape for key, shape in shapes.items()}


def kept_roles(entry: Config) -> frozenset[str]:
    """The roles of a layer's tensors that a block with this memory keeps.

    Raises:
        RequestError: If the entry says neither that the output projection stays nor that it goes.
    """
    return ATTENTION_ROLES | ATTENTION_OUTPUT_ROLES if _keeps_output_projection(entry) else ATTENTION_ROLES


def is_buffer(name: str) -> bool:
    """Whether a tensor, by its full name or its name within a layer, is a memory's buffer and no parameter."""
    return f".{name}".endswith(tuple(f".{buffer}" for buffer in _BUFFERS))


def head_width(family: Family, config: Config, entry: Config) -> int:
    """Width of each head's share of the attention output that the memory reads, and of its query."""
    if _keeps_output_projection(entry):
        return config["hidden_size"] // family.num_heads(config)
    return family.head_dim(config)


def memory_by_layer(config: Config) -> dict[int, Config]:
    """The memory entry of each layer that was inserted for one, by index.

    Raises:
        RequestError: If an entry is malformed.
    """
    entries = config.get("memory") or []
    if not isinstance(entries, list):
        raise RequestError(f"config.json has memory = {entries!r}; expected a list of entries.")
    by_layer: dict[int, Config] = {}
    for entry in entries:
        layers = entry.get("layers") if isinstance(entry, dict) else None
        known = isinstance(entry, dict) and str(entry.get("type")) in MEMORY_SHAPES
        if not known or not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise RequestError(
                f"config.json has the memory entry {entry!r}; expected an object with 'layers' and a 'type' out of: "
                f"{', '.join(MEMORY_SHAPES)}."
            )
        by_layer.update(dict.fromkeys(layers, entry))
    return by_layer


def register_memory_shapes(name: str) -> Callable[[MemoryShapes], MemoryShapes]:
    """Register `(family, config, entry) -> {name: shape}` for a memory type; norms and gates are added to it."""

    def decorate(function: MemoryShapes) -> MemoryShapes:
        MEMORY_SHAPES[name] = function
        return function

    return decorate


@register_memory_shapes("headwise")
def headwise(family: Family, config: Config, entry: Config) -> dict[str, Shape]:
    """Head-wise memory: sub-keys per head, values of width D / H, a transform per head (MIDUS, section 4.2)."""
    heads, n, values = family.num_heads(config), _size(entry, "n", 64), _choice(entry, "values", _VALUES, "expanded")
    width = config["hidden_size"] // heads
    shapes: dict[str, Shape] = {
        **_sub_keys(family, config, entry, n),
        "value_bank": (heads, n * n, width) if values == "own" else (n * n, width),
    }
    return {**shapes, "value_transform": (heads, width, width)} if values == "expanded" else shapes


@register_memory_shapes("product-key")
def product_key(family: Family, config: Config, entry: Config) -> dict[str, Shape]:
    """Product-key memory: sub-keys per head, values of width D that all heads read."""
    hidden, n = config["hidden_size"], _size(entry, "n", 64)
    return {
        "query_projection.weight": (hidden, hidden),
        **_sub_keys(family, config, entry, n),
        "value_bank": (n * n, hidden),
    }


@register_memory_shapes("linear")
def linear(family: Family, config: Config, entry: Config) -> dict[str, Shape]:
    """Linear memory: a key a slot and head, values of width D that all heads read."""
    hidden, slots = config["hidden_size"], _size(entry, "slots", 4096)
    return {
        "query_projection.weight": (hidden, hidden),
        "slot_keys": (family.num_heads(config), slots, head_width(family, config, entry)),
        "value_bank": (slots, hidden),
    }


_VALUES = ("expanded", "shared", "own")
_QUERY_NORMS = ("none", "batch", "layer")
_GATES = ("none", "token", "head")


def _sub_keys(family: Family, config: Config, entry: Config, n: int) -> dict[str, Shape]:
    shape = (family.num_heads(config), n, head_width(family, config, entry) // 2)
    return {"row_keys": shape, "column_keys": shape}


def _norm_and_gate(family: Family, config: Config, entry: Config) -> dict[str, Shape]:
    """What every memory may have in front of its keys and behind its values."""
    heads, width = family.num_heads(config), head_width(family, config, entry)
    norm = _choice(entry, "query_norm", _QUERY_NORMS, "none" if entry["type"] == "headwise" else "batch")
    gates_of_type = _GATES if entry["type"] == "headwise" else _GATES[:2]  # one sum over heads has no gate a head
    gate = _choice(entry, "gate", gates_of_type, "none")
    names = [] if norm == "none" else ["query_norm_weight", "query_norm_bias"]
    names += [buffer.removeprefix("memory.") for buffer in _BUFFERS if norm == "batch"]
    shapes: dict[str, Shape] = dict.fromkeys(names, (heads, width))
    if gate != "none":
        gates = heads if gate == "head" else 1
        shapes |= {"gate_weight": (gates, heads * width), "gate_bias": (gates,)}
    return shapes


def _keeps_output_projection(entry: Config) -> bool:
    return entry["type"] != "headwise" or _choice(entry, "output_projection", (False, True), False)


def _size(entry: Config, key: str, default: int) -> int:
    size = entry.get(key, default)
    if type(size) is not int or size < 1:
        raise RequestError(
            f"config.json has a {entry['type']} memory of {key} = {size!r}; expected a positive integer."
        )
    return size


def _choice(entry: Config, key: str, choices: tuple[Any, ...], default: Any) -> Any:
    value = entry.get(key, default)
    if type(value) is not type(default) or value not in choices:
        raise RequestError(
            f"config.json has a {entry['type']} memory of {key} = {value!r}; expected one of: "
            f"{', '.join(map(str, choices))}."
        )
    return value
