"""What every memory layer has in common, and the table of those that exist."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig

MEMORY_TYPES: dict[str, type["MemoryModule"]] = {}


@dataclasses.dataclass(kw_only=True)
class MemoryOptions:
    """One entry of a config's `memory` list, without its `type`.

    Args:
        layers: Indices of the layers that hold this memory, ascending.

    Raises:
        ValueError: If `layers` is not a list of whole numbers, or they do not ascend.
    """

    layers: list[int]

    @property
    def keeps_output_projection(self) -> bool:
        """Whether the attention in front of an inserted memory keeps its output projection, and the norm behind it."""
        return False

    @property
    def adds_block_input(self) -> bool:
        """Whether the block's input is added to the attention output that an inserted memory reads."""
        return False

    def __post_init__(self) -> None:
        if not isinstance(self.layers, list) or any(type(layer) is not int for layer in self.layers):
            raise ValueError(f"layers is {self.layers!r}; expected a list of layer indices.")
        if self.layers != sorted(set(self.layers)):
            raise ValueError(f"layers is {self.layers}; expected ascending indices, each once.")


class MemoryModule(nn.Module):
    """A memory layer: keys, values, and the way from hidden states to what they retrieve.

    A subclass is registered under the `type` that configs call it by. It owns its tables as raw parameters and reads
    them in its own `forward`, which is what offloading and sharding hooks need. No parameter may have the name of a
    dict method (`values`, `keys`), which PEFT cannot wrap.
    """

    site: ClassVar[str]
    """Where the memory sits: `"inserted"` has a decoder layer of its own."""

    options_class: ClassVar[type[MemoryOptions]]
    key_value_parameters: ClassVar[tuple[str, ...]]
    """Names of the parameters that are keys and values: trained at a constant rate, without weight decay."""

    value_parameters: ClassVar[tuple[str, ...]]
    """Those of `key_value_parameters` that are values."""

    transform_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters that make values from others, where the layer has them: the W_h of HIVE."""

    norm_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters that are gains and biases of norms, whatever their dimensions: without weight decay."""

    values_were_set: bool = False
    """Whether a model that went into training mode has seen its frozen values to be anything but zero."""

    @classmethod
    def from_config(cls, config: PreTrainedConfig, options: Any) -> "MemoryModule":
        """Build the layer for a model of `config`."""
        raise TypeError(f"{cls.__name__} does not say how it is built from a config.")

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator | None = None) -> None:
        """Fill `tensor` in place with the initial value of the parameter or buffer `name`; the same generator, the same bytes."""
        raise TypeError(f"{type(self).__name__} does not say how {name} is initialised.")

    def reset_parameters(self) -> None:
        """Initialise every parameter and buffer that no checkpoint has filled."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if not getattr(tensor, "_is_hf_initialized", False):
                with torch.no_grad():
                    self.init_parameter(name, tensor)


def register_memory(name: str, options: type[MemoryOptions]) -> Callable[[type[MemoryModule]], type[MemoryModule]]:
    """Register a `MemoryModule` under the `type` that configs call it by.

    Args:
        name: The type, lower case, words joined by hyphens or underscores.
        options: The dataclass of what an entry of this type may say.

    Raises:
        ValueError: If the name is taken by another class.
    """

    def decorate(cls: type[MemoryModule]) -> type[MemoryModule]:
        taken = MEMORY_TYPES.get(name)
        if taken is not None and taken.__qualname__ != cls.__qualname__:
            raise ValueError(f"memory type {name!r} is already registered by {taken.__name__}; choose another name.")
        cls.options_class = options
        MEMORY_TYPES[name] = cls
        return cls

    return decorate


def parse_memory_entry(entry: dict[str, Any]) -> tuple[type[MemoryModule], MemoryOptions]:
    """Read one entry of a config's `memory` list.

    Args:
        entry: `{"type": ..., "layers": [...], ...}`.

    Returns:
        The class of the memory and its options.

    Raises:
        ValueError: If the entry is not a mapping, the type or a key is unknown, or a required key is missing.
    """
    if not isinstance(entry, dict):
        raise ValueError(
            f"memory entry is {entry!r}; expected a mapping such as {{'type': 'headwise', 'layers': [1]}}."
        )
    name = entry.get("type")
    if not isinstance(name, str) or name not in MEMORY_TYPES:
        raise ValueError(f"memory type is {name!r}; expected one of {sorted(MEMORY_TYPES)}.")
    memory_class = MEMORY_TYPES[name]
    fields = {field.name: field for field in dataclasses.fields(memory_class.options_class)}
    given = {key: value for key, value in entry.items() if key != "type"}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise ValueError(f"memory entry of type {name!r} has unknown keys {unknown}; it knows {sorted(fields)}.")
    if "layers" not in given:
        raise ValueError(
            f"memory entry of type {name!r} has no 'layers'; expected the indices of the layers that hold it."
        )
    return memory_class, memory_class.options_class(**given)
