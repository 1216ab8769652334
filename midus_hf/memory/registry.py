"""What every memory layer has in common, and the table of those that exist.

A subclass of `MemoryModule` is registered under the type whose options declare its tensors, which it therefore need not make.
It reads them in its own `forward`, which is what offloading and sharding hooks need. What it is called with, and what it
returns, follows from its site:

- `inserted`: `forward(attention_output, residual)`, the attention output `[B, T, W]` and the residual stream `[B, T, D]`, which
  it returns with what it retrieves.
- `inside-ffn`, `inside-attention`: `forward(read, given, projection=role)` for each of its `projections`, what the projection
  reads and what it gives; it returns what the projection shall give instead.
- `inside-attention`, if it `reads_heads`: `forward(query, key, value, output)`, queries `[B, H, T, d]`, keys and values `[B, K,
  S, d]`, rotated and from the cache, and what the heads give `[B, T, H, d]`; it returns what they shall give.
- `inside-attention`, if its options say that it `attends`: `forward(read, slot=source)`, `[B, T, D]`, for each slot that it
  projects; it returns a key and a value `[B, K, T, d]`. And `forward(query, sequence=..., keys=..., values=...)`, which attends
  in the place of the layer's own attention (`DepthAttention.attend`).
- any other: `forward(hidden_states)`, `[B, T, D]`, what there is to read; it returns what is added, `[B, T, D]`.

A memory that shares tables is also given `tables`, those of its layer by name, each of its `inputs` that the model was called
with, by that name, and what it `asks` the model for.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from torch import nn

from midus_hf.config.installed import INSTALLED
from midus_hf.config.memory_types import MEMORY_TYPES, MemoryOptions, sample_tensors
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.plugins import is_same_class, load_offered
from midus_hf.memory.declared_module import DeclaredModule

MEMORY_MODULES: dict[str, type["MemoryModule"]] = {}
"""The module of each type of memory."""


class MemoryModule(DeclaredModule):
    """A memory layer: keys, values, and the way from hidden states to what they retrieve.

    Args:
        options: Of its type.
        sizes: Of the model.

    Raises:
        ValueError: If the memory does not fit the model.
    """

    memory_type: ClassVar[str]
    inputs: tuple[str, ...] = ()
    """Names of keyword arguments of the model's forward pass that the memory asks for; options may make them fewer."""
    asks: tuple[Literal["tokens", "state", "report", "fetched"], ...] = ()
    """What the model tells the memory, by keyword. `tokens`: a `TokenPlaces`. `state`: a `MemoryState`, if the pass has a cache and
    the memory `keeps_state`. `report`: a `RouterReport`, if somebody wants to know how it routes. `fetched`: a `FetchedLayer`, what
    the texts fetched for the layer; where they fetched nothing, the memory is passed by. Options may make them fewer."""
    projections: ClassVar[tuple[str, ...]] = ()
    """Roles of the projections that a memory inside attention or a feed-forward network changes: `query`, `key`, `value`,
    `output_projection`, `gate`, `up`, `down`."""
    reads_heads: ClassVar[bool] = False
    """Whether a memory inside attention changes what the heads give."""
    wants_unrotated: ClassVar[bool] = False
    """Whether a memory that `reads_heads` gets queries `[B, H, T, d]` without their rotation as well, as `unrotated`."""
    keeps_state: bool = False
    """Whether what a token gets depends on earlier tokens: then the cache keeps what the memory needs of them."""
    can_forget: bool = True
    """Whether the state stays right when the last tokens of a sequence are taken back, as assisted decoding does."""
    reads_ahead: bool = False
    """Whether what a token gets depends on later tokens: then a sequence cannot be continued from a cache."""
    index: int = 0
    """Which of the layers that have the memory this one is in, counted from 0; the host says."""
    values_were_set: bool = False
    """Whether a model that went into training mode has seen what it adds through, frozen, to be anything but zero."""

    def __init__(self, options: Any, sizes: ModelSizes):
        if INSTALLED:
            options.check(sizes)
        super().__init__(options.tensors(sizes))
        self.options: Any = options

    def names_it_acts_through(self) -> list[str]:
        """Names of the tensors without which the memory has no effect: while those of them that start at zero are zero.

        Values and projections, unless a memory says otherwise; none, if it acts whatever it holds.
        """
        return self.names_of("value", "projection")


def register_memory(name: str) -> Callable[[type[MemoryModule]], type[MemoryModule]]:
    """Register a `MemoryModule` as the module of a type of memory.

    Args:
        name: The type, whose options `midus_hf.config` has.

    Raises:
        ValueError: If there is no such type, it has another module, or a tensor with the name of something that every module has.
    """

    def decorate(cls: type[MemoryModule]) -> type[MemoryModule]:
        if name not in MEMORY_TYPES:
            raise ValueError(
                f"memory type {name!r} has a module, {cls.__name__}, but no options; expected one of "
                f"{', '.join(sorted(MEMORY_TYPES))}. Register its options with register_memory_type first."
            )
        taken = MEMORY_MODULES.get(name)
        if taken is not None and not is_same_class(taken, cls):
            raise ValueError(f"memory type {name!r} already has the module {taken.__name__}; choose another name.")
        _check_names(name)
        cls.memory_type = name
        MEMORY_MODULES[name] = cls
        return cls

    return decorate


def _check_names(memory_type: str) -> None:
    """Refuse a tensor that would take the place of something that a memory or any torch module has."""
    names = [name.partition(".")[0] for name, _ in sample_tensors(MEMORY_TYPES[memory_type])]
    of_instances = {"declared", "options", *vars(nn.Module())}
    taken = [name for name in names if name in of_instances or hasattr(MemoryModule, name)]
    if taken:
        raise ValueError(
            f"memory type {memory_type!r} has a tensor {taken[0]!r}, the name of something that every module of a memory has; choose "
            "another."
        )


def build_memory(options: MemoryOptions, sizes: ModelSizes, index: int = 0, count: int = 1) -> MemoryModule:
    """The module of a memory in one layer.

    Args:
        options: Of its type.
        sizes: Of the model.
        index: Which of the layers that have the memory it is in. Default: the first.
        count: How many layers have it. Default: one.

    Raises:
        ValueError: If its type has none, or one with parameters or buffers that its options do not declare.
    """
    memory = module_of(options.type)(options, sizes)
    memory.index = index
    for name in memory.declared.keys() - options.tensors_at(sizes, index, count).keys():
        memory.leave_out(name)
    if INSTALLED:
        _check_declared(memory, options)
    return memory


def _check_declared(memory: MemoryModule, options: MemoryOptions) -> None:
    """Refuse a module with tensors that its options do not declare."""
    tensors = [name for name, _ in (*memory.named_parameters(), *memory.named_buffers())]
    undeclared = [name for name in tensors if name not in memory.declared]
    if undeclared:
        raise ValueError(
            f"the module of memory type {options.type!r} has a tensor {undeclared[0]!r}, which {type(options).__name__}.tensors "
            "leaves out; expected tensors that are declared. Declare it there."
        )


def module_of(memory_type: str) -> type[MemoryModule]:
    """The class of a type's module, here or offered by another package.

    Raises:
        ValueError: If it has none.
    """
    if memory_type not in MEMORY_MODULES:
        load_offered("midus_hf.memories")
    if memory_type not in MEMORY_MODULES:
        raise ValueError(
            f"memory type {memory_type!r} has no module; expected one of {', '.join(sorted(MEMORY_MODULES))}. Import what "
            "registers it."
        )
    return MEMORY_MODULES[memory_type]
