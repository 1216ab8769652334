"""The tensors of each memory type, as far as planning needs to know them: names and shapes, from the raw config."""

from collections.abc import Callable

from upscalers.engine.errors import RequestError, near_matches
from upscalers.engine.families import Config, Family, Shape

MemoryShapes = Callable[[Family, Config, Config], dict[str, Shape]]
MEMORY_SHAPES: dict[str, MemoryShapes] = {}


def memory_shapes(family: Family, config: Config, entry: Config) -> dict[str, Shape]:
    """Shapes of the tensors of one inserted memory, by their name within the layer.

    Args:
        family: The family of the model.
        config: The raw `config.json`.
        entry: The memory's entry, `{"type": ..., ...}`.

    Raises:
        RequestError: If the type is unknown.
    """
    name = str(entry.get("type"))
    if name not in MEMORY_SHAPES:
        raise RequestError(f"memory type {name!r} is unknown. {near_matches(name, MEMORY_SHAPES)}")
    return {f"memory.{key}": shape for key, shape in MEMORY_SHAPES[name](family, config, entry).items()}


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
    """Register `(family, config, entry) -> {parameter: shape}` for a memory type."""

    def decorate(function: MemoryShapes) -> MemoryShapes:
        MEMORY_SHAPES[name] = function
        return function

    return decorate


@register_memory_shapes("headwise")
def headwise(family: Family, config: Config, entry: Config) -> dict[str, Shape]:
    """Head-wise memory: sub-keys a head, one bank of values of width D / H, a transform a head (MIDUS, section 4.2)."""
    heads, head_dim, hidden, n = (
        family.num_heads(config),
        family.head_dim(config),
        config["hidden_size"],
        entry.get("n", 64),
    )
    if type(n) is not int or n < 1:
        raise RequestError(f"config.json has a headwise memory of n = {n!r}; expected a positive integer.")
    width = hidden // heads
    return {
        "row_keys": (heads, n, head_dim // 2),
        "column_keys": (heads, n, head_dim // 2),
        "value_bank": (n * n, width),
        "value_transform": (heads, width, width),
    }
