"""Parts that a model has only if its memories need them: services of a pass, sites in layers, and mixins of its classes.

A model finds the parts by name, in the tables of this module. So the code that a checkpoint carries can leave out the parts that its
memories do not need: they are not registered there, and nothing else names them.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch

from midus_hf.config.memory_entries import Memories, MemoryEntry
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.registry import MemoryModule

Part = TypeVar("Part")


class Service:
    """Service of a model to its memories: something that it makes in every pass for the memories that need it.

    Args:
        model: The stack of layers, whose memories are built.
        memories: Memories of the model.
        hosted: The module of each memory in each layer, by name and layer; the name of an inserted memory is empty.
    """

    #: Name under which the service is registered.
    key: ClassVar[str]

    def __init__(self, model: Any, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        pass

    @staticmethod
    def layers(model: Any, memories: Memories) -> dict[int, tuple[Any, ...]]:
        """Return the classes that may take over each layer, by the layer's index. Default: none."""
        return {}

    def of_pass(self, model: Any, arguments: dict[str, Any], own: Mapping[str, Any]) -> Any:
        """Return the value of the pass, which `given` takes. Default: None.

        Args:
            model: The stack of layers.
            arguments: Arguments of the family's forward by name, which the service may change.
            own: Arguments that the family's forward does not get.
        """
        return None

    @staticmethod
    def given(value: Any, memory_class: type[MemoryModule], name: str, layer: int) -> dict[str, Any]:
        """Return the keyword arguments of a memory in a layer. Default: none.

        Args:
            value: Result of `of_pass`; None for a pass without inputs.
            memory_class: Class of the memory's module.
            name: Name of an attached memory; empty for an inserted memory.
            layer: Index of the memory's layer.
        """
        return {}


class LayerCall:
    """One call of a layer with attached memories: what hooks on the layer's parts read, from the first to the last of them.

    Args:
        entered: `[B, T, D]`, the input of the layer.
        memory_inputs: Inputs of the pass for memories.
        carried: Tensors from earlier layers by `Carried`, to which the layer adds the tensors for later layers.
        rotation: Cosines and sines of the pass at this layer; None if there are none.
    """

    def __init__(
        self, entered: torch.Tensor, memory_inputs: Any, carried: dict[Any, torch.Tensor | None], rotation: Any
    ):
        self.entered, self.memory_inputs, self.carried, self.rotation = entered, memory_inputs, carried, rotation
        # What the attention of the layer read, `[B, T, D]`, and its own keys and values, `[B, K, T, d]`, where a site notes them.
        self.attention_input: torch.Tensor | None = None
        self.own_heads: tuple[torch.Tensor, torch.Tensor] | None = None


class Site:
    """Memories at a site of one layer, which change what parts of the layer compute, by forward hooks on the parts.

    Hooks read `layer.call`, which the layer's forward sets at its beginning and takes away at its end.

    Args:
        layer: The host layer, whose memories are built.
        config: Config of the model.
        memories: Memories of the model.
    """

    #: Name under which the site is registered.
    key: ClassVar[str]
    #: The site, as entries of a config name it.
    name: ClassVar[str]

    def __init__(self, layer: Any, config: Any, memories: Memories):
        self.layer = layer
        # For the path of each part in the layer, the hook, and whether it runs before the part.
        self._hooks: dict[str, tuple[Callable[..., Any], bool]] = {}
        self._hooked: dict[str, Any] = {}  # the module that was last seen at each path

    @staticmethod
    def is_behind(layer: int, memories: Memories) -> bool:
        """Return whether a layer has the site though none of its memories needs the site. Default: false."""
        return False

    @staticmethod
    def is_missing(layer: Any) -> bool:
        """Return whether a layer lacks the part at which memories are to be attached. Default: false."""
        return False

    def hook(self, path: str, hook: Callable[..., Any], *, before: bool = False) -> None:
        """Run a hook, which gets keyword arguments too, behind or before the part of the layer at a path."""
        self._hooks[path] = hook, before
        self.attach()

    def attach(self) -> None:
        """Register each hook, unless the module at its path, or one that this wraps, has it: others may have replaced the module.

        Quantisation replaces linear layers, vLLM norms too, and an adapter wraps what it changes.
        """
        for path, (hook, before) in self._hooks.items():
            part = self.layer
            for name in path.split("."):
                part = getattr(part, name)
            if part is self._hooked.get(path):
                continue
            table = "_forward_pre_hooks" if before else "_forward_hooks"
            if not any(hook in getattr(module, table).values() for module in part.modules()):
                register = part.register_forward_pre_hook if before else part.register_forward_hook
                register(hook, with_kwargs=True)
            self._hooked[path] = part

    def behind(self, output: Any) -> Any:
        """Return the output of the layer with what memories add behind it."""
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy for a copy of the layer; the copy of a part alone, as PEFT makes it, belongs to this layer."""
        if id(self.layer) not in memo:
            return self
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


#: Services by name. Memories name in their `context` the services whose arguments they take.
SERVICES: dict[str, type[Service]] = {}
#: Sites by name, in the order in which their hooks run at a part that several of them change.
SITES: dict[str, type[Site]] = {}
#: For each mixin that some models need, the services and sites with which it is needed.
MIXINS: dict[type, tuple[str, ...]] = {}


def register(table: dict[str, Any], key: str) -> Callable[[type[Part]], type[Part]]:
    """Return a decorator that registers a part under a key, in `SERVICES` or `SITES`."""

    def decorate(cls: Any) -> Any:
        cls.key = key
        table[key] = cls
        return cls

    return decorate


def mixin_for(*names: str) -> Callable[[type[Part]], type[Part]]:
    """Return a decorator for a mixin that the classes of a model need only with one of these services and sites."""

    def decorate(cls: type[Part]) -> type[Part]:
        MIXINS[cls] = names
        return cls

    return decorate


def needs_of(entry: MemoryEntry, memory: MemoryModule, sizes: ModelSizes) -> set[str]:
    """Return the names of the services and the sites that a memory needs; names in its `context` are among them.

    Args:
        entry: The memory's entry in the config.
        memory: The memory's module in one layer.
        sizes: Sizes of the model.
    """
    options, is_attached, is_inside = entry.options, entry.is_attached, entry.site == "inside-attention"
    conditions = {
        "attached": is_attached,
        "arguments": bool(memory.forward_arguments),
        "tables": is_attached and bool(options.tables(sizes, entry.layers)),
        "whole": options.reads_ahead,
        "narrow": is_attached and options.narrows_start,
        "attention-adapters": is_inside and bool(memory.projections),
        "attention-heads": is_inside and memory.reads_heads,
        "depth": is_inside and options.attends,
    }
    return {entry.site, *memory.context, *(name for name, is_needed in conditions.items() if is_needed)}


def first_of(output: Any) -> torch.Tensor:
    """Return the hidden states in the output of a part, which may be a tuple that begins with them."""
    return output if isinstance(output, torch.Tensor) else output[0]


def with_first(output: Any, hidden_states: torch.Tensor) -> Any:
    """Return the output of a part with other hidden states."""
    return hidden_states if isinstance(output, torch.Tensor) else (hidden_states, *output[1:])


def read_by(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the hidden states that a part was called with."""
    return args[0] if args else kwargs["hidden_states"]
