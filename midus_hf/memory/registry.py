"""What every memory layer has in common, and the table of those that exist."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from midus_config.declared_tensors import Role
from midus_config.memory_types import MEMORY_TYPES, MemoryOptions
from midus_config.model_sizes import ModelSizes

MEMORY_MODULES: dict[str, type["MemoryModule"]] = {}
"""The module of each type of memory."""


class MemoryModule(nn.Module):
    """A memory layer: keys, values, and the way from hidden states to what they retrieve.

    A subclass is registered under the type whose options declare its tensors, which it therefore need not make: they are raw
    parameters and buffers, and linear layers where the name says `NAME.weight`. It reads them in its own `forward`, which
    is what offloading and sharding hooks need.

    Args:
        options: Of its type.
        sizes: Of the model.

    Raises:
        ValueError: If the memory does not fit the model.
    """

    memory_type: ClassVar[str]
    values_were_set: bool = False
    """Whether a model that went into training mode has seen its frozen values to be anything but zero."""

    def __init__(self, options: Any, sizes: ModelSizes):
        super().__init__()
        options.check(sizes)
        self.options: Any = options
        self.declared = options.tensors(sizes)
        for name, tensor in self.declared.items():
            if name.endswith(".weight"):
                outputs, inputs = tensor.shape
                setattr(self, name.removesuffix(".weight"), nn.Linear(inputs, outputs, bias=False))
            elif tensor.role == "buffer":
                self.register_buffer(name, torch.empty(tensor.shape))
            else:
                setattr(self, name, nn.Parameter(torch.empty(tensor.shape)))
        self.reset_parameters()

    def names_of(self, *roles: Role) -> list[str]:
        """Names of the tensors that have one of the roles."""
        return [name for name, tensor in self.declared.items() if tensor.role in roles]

    def reset_parameters(self) -> None:
        """Initialise every parameter and buffer that no checkpoint has filled."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if not getattr(tensor, "_is_hf_initialized", False):
                with torch.no_grad():
                    self.declared[name].initial.fill(tensor)


def register_memory(name: str) -> Callable[[type[MemoryModule]], type[MemoryModule]]:
    """Register a `MemoryModule` as the module of a type of memory.

    Args:
        name: The type, whose options `midus_config` has.

    Raises:
        ValueError: If there is no such type, or it has another module.
    """

    def decorate(cls: type[MemoryModule]) -> type[MemoryModule]:
        if name not in MEMORY_TYPES:
            raise ValueError(
                f"memory type {name!r} has a module, {cls.__name__}, but no options; expected one of "
                f"{', '.join(sorted(MEMORY_TYPES))}. Register its options with register_memory_type first."
            )
        taken = MEMORY_MODULES.get(name)
        if (
            taken is not None and taken.__qualname__ != cls.__qualname__
        ):  # a checkpoint's own code brings the same class
            raise ValueError(f"memory type {name!r} already has the module {taken.__name__}; choose another name.")
        cls.memory_type = name
        MEMORY_MODULES[name] = cls
        return cls

    return decorate


def build_memory(options: MemoryOptions, sizes: ModelSizes) -> MemoryModule:
    """The module of a memory.

    Raises:
        ValueError: If its type has none.
    """
    if options.type not in MEMORY_MODULES:
        raise ValueError(
            f"memory type {options.type!r} has no module; expected one of {', '.join(sorted(MEMORY_MODULES))}. Import what "
            "registers it."
        )
    return MEMORY_MODULES[options.type](options, sizes)
