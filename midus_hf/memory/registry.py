"""Base class of all memory layers, and the registry of their types.

A subclass of `MemoryModule` is registered under the type whose options declare its tensors; the base class makes the tensors.
A memory must read its tensors in its own `forward`, as the hooks of offloading and sharding need it. The arguments and the
result of `forward` depend on the memory's site:

- `inserted`: `forward(attention_output, residual)` takes the attention output `[B, T, W]` and the residual stream `[B, T, D]`,
  and returns the residual stream with the retrieved values added.
- `inside-ffn`, `inside-attention`: `forward(read, output, projection=role)` is called for each of its `projections` with the
  projection's input and output, and returns the output to use instead.
- `inside-attention`, if it `reads_heads`: `forward(query, key, value, output)` takes queries `[B, H, T, d]`, keys and values
  `[B, K, S, d]`, rotated and from the cache, and the output of the heads `[B, T, H, d]`; it returns the output to use instead.
- `inside-attention`, if its options have `attends`: `forward(read, slot=source)` takes `[B, T, D]` for each slot that the memory
  projects, and returns a key and a value `[B, K, T, d]`. `forward(query, sequence=..., keys=..., values=...)` replaces the
  layer's own attention (`DepthAttention.attend`).
- any other site: `forward(hidden_states)` takes `[B, T, D]`, the memory's input, and returns what is added, `[B, T, D]`.

`forward` also takes, by keyword: `tables`, the tables of its layer by name, if the memory shares tables; each of the memory's
`forward_arguments` that the model was called with; and the objects that its `context` names.
"""

import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import singledispatch
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from midus_hf.config.declarations import sample_tensors
from midus_hf.config.memory_types import MEMORY_TYPES, MemoryOptions, check_fit
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.plugins import is_same_class, load_offered
from midus_hf.memory.tables import DeclaredModule

#: The module class of each type of memory.
MEMORY_MODULES: dict[str, type["MemoryModule"]] = {}


class MemoryModule(DeclaredModule):
    """A memory layer: its keys and values, and the retrieval of values for hidden states.

    Args:
        options: Options of the memory's type.
        sizes: Sizes of the model.

    Raises:
        ValueError: If the memory does not fit the model.
    """

    memory_type: ClassVar[str]
    #: Names of keyword arguments of the model's forward pass that the memory takes; options may leave some out. A memory that
    #: takes `input_ids` `[B, T]` always gets them, also in passes of embeddings: these then need `token_ids` beside them.
    forward_arguments: tuple[str, ...] = ()
    #: Keyword arguments that the model makes for the memory. `tokens`: a `TokenPlaces`. `state`: a `MemoryState`, if
    #: the pass has a cache, of a memory whose result for a token depends on earlier tokens. `report`: a `RouterReport`, if the
    #: pass collects reports of routers. `fetched`: a `FetchedLayer`, the blocks fetched for the layer; without blocks, the memory
    #: is not called. Options may leave some out.
    context: tuple[Literal["tokens", "state", "report", "fetched"], ...] = ()
    #: Roles of the projections whose output a memory inside attention or a feed-forward network changes: `query`,
    #: `key`, `value`, `output_projection`, `gate`, `up`, `down`.
    projections: ClassVar[tuple[str, ...]] = ()
    #: Whether a memory inside attention changes the output of the heads.
    reads_heads: ClassVar[bool] = False
    #: Whether a memory that `reads_heads` also takes queries `[B, H, T, d]` without their rotation, as `unrotated`.
    wants_unrotated: ClassVar[bool] = False
    #: Whether the last tokens of a sequence can be taken back, as in assisted decoding.
    can_forget: bool = True
    #: Function that takes the last tokens out of a state's tensors. Default: None, the tensors do not depend on these tokens.
    take_back: ClassVar["staticmethod[[dict[str, torch.Tensor], int], dict[str, torch.Tensor] | None] | None"] = None
    #: Index of the memory's layer among the layers that have the memory, from 0; set by the host.
    index: int = 0
    #: What keeps tensors derived from weights during a generation; set by `build_memory`. Default: None, nothing.
    kept: Any = None

    def __init__(self, options: Any, sizes: ModelSizes):
        check_fit(options, sizes)
        super().__init__(options.tensors(sizes))
        self.options: Any = options

    def extra_repr(self) -> str:
        """Return the options that differ from their defaults."""
        usual = type(self.options)()
        chosen = {name: value for name, value in vars(self.options).items() if value != getattr(usual, name)}
        return ", ".join(f"{name}={value}" for name, value in chosen.items())


def register_memory(name: str) -> Callable[[type[MemoryModule]], type[MemoryModule]]:
    """Return a decorator that registers a `MemoryModule` as the module of a type of memory.

    Args:
        name: The type of memory, whose options are registered already.

    Raises:
        ValueError: If the type is unknown or has another module, or `check_module` refuses the module of another package.
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
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:  # a test checks this package's own modules
            check_module(name, cls)
        cls.memory_type = name
        MEMORY_MODULES[name] = cls
        return cls

    return decorate


def check_module(memory_type: str, cls: type[MemoryModule]) -> None:
    """Refuse a module that cannot hold the tensors of its type, or reads the weight of a linear layer that it should call.

    Raises:
        ValueError: If a tensor has the name of an attribute of every memory or torch module, or the code reads the weight of a
            linear layer.
    """
    names = [name for name, _ in sample_tensors(MEMORY_TYPES[memory_type])]
    of_instances = {"declared", "options", *vars(nn.Module())}
    for name in (name.partition(".")[0] for name in names):
        if name in of_instances or hasattr(MemoryModule, name):
            raise ValueError(
                f"memory type {memory_type!r} has a tensor {name!r}, the name of something that every module of a memory has; "
                "choose another."
            )
    sources = []
    for each in cls.__mro__[: cls.__mro__.index(MemoryModule)]:
        with suppress(OSError, TypeError):  # no source, as in an interactive session
            sources.append(inspect.getsource(each))
    for name in (name.rpartition(".")[0] for name in names if "." in name):
        if any(re.search(rf"\bself\.{name}\.weight\b(?!\.(dtype|device|shape)\b)", source) for source in sources):
            raise ValueError(
                f"the module of memory type {memory_type!r} reads self.{name}.weight; expected self.{name}(...), since offloading, "
                "sharding and the check of an upscaling fill the weight of a linear layer only while the layer is called. Call the "
                f"layer, or declare a tensor {name!r} without '.weight' and read it."
            )


def build_memory(options: MemoryOptions, sizes: ModelSizes, index: int = 0, count: int = 1) -> MemoryModule:
    """Build the module of a memory for one layer.

    Args:
        options: Options of the memory.
        sizes: Sizes of the model.
        index: Index of the layer among the layers that have the memory. Default: 0.
        count: Number of layers that have the memory. Default: 1.

    Raises:
        ValueError: If the type has no module, or the module has parameters or buffers that the options do not declare.
    """
    memory = module_of(options.type)(options, sizes)
    memory.index = index
    for name in memory.declared.keys() - options.tensors_at(sizes, index, count).keys():
        memory.leave_out(name)
    memory.kept = keeper_of(memory)
    check_built(memory)
    return memory


@singledispatch
def keeper_of(memory: MemoryModule) -> Any:
    """Return what keeps tensors that a memory derives from weights (`midus_hf.memory.kept_values`). Default: None, nothing."""
    return None


@singledispatch
def while_generating(model: nn.Module) -> AbstractContextManager[None]:
    """Return the context in which a model generates. Default: nothing is kept (`midus_hf.memory.kept_values`)."""
    return nullcontext()


def check_built(memory: MemoryModule) -> None:
    """Refuse a module with tensors that its options do not declare."""
    tensors = [name for name, _ in (*memory.named_parameters(), *memory.named_buffers())]
    undeclared = [name for name in tensors if name not in memory.declared]
    if undeclared:
        raise ValueError(
            f"the module of memory type {memory.memory_type!r} has a tensor {undeclared[0]!r}, which "
            f"{type(memory.options).__name__}.tensors leaves out; expected tensors that are declared. Declare it there."
        )


def module_of(memory_type: str) -> type[MemoryModule]:
    """Return the module class of a type of memory, from this package or offered by another package.

    Raises:
        ValueError: If the type has no module.
    """
    if memory_type not in MEMORY_MODULES:
        load_offered("midus_hf.memories")
    if memory_type not in MEMORY_MODULES:
        raise ValueError(
            f"memory type {memory_type!r} has no module; expected one of {', '.join(sorted(MEMORY_MODULES))}. Import what "
            "registers it."
        )
    return MEMORY_MODULES[memory_type]
