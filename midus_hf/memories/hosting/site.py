"""The base class of sites, at which memories change what parts of a layer compute, and one call of the layer."""

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from midus_hf.memories.entries import Memories, MemoryEntry


class LayerCall:
    """One call of a layer with attached memories: what hooks on the layer's parts read, from the first to the last of them.

    Args:
        entered: `[B, T, D]`, the input of the layer.
        memory_inputs: Inputs of the pass for memories.
        carried: Tensors from earlier layers by `CarriedKey`, to which the layer adds the tensors for later layers.
        rotation: Cosines and sines of the pass at this layer; None if there are none.
    """

    def __init__(
        self, entered: torch.Tensor, memory_inputs: Any, carried: dict[Any, torch.Tensor | None], rotation: Any
    ):
        self.entered, self.memory_inputs, self.carried, self.rotation = entered, memory_inputs, carried, rotation
        # What the attention of the layer read, `[B, T, D]`, and its own keys and values, `[B, K, T, d]`, where a site notes them.
        self.attention_input: torch.Tensor | None = None
        self.own_heads: tuple[torch.Tensor, torch.Tensor] | None = None


class LayerCalls(threading.local):
    """The call of a layer that runs now, in each thread that runs the model; a copy of the layer begins without one."""

    current: LayerCall | None = None

    def __reduce__(self) -> Any:
        return type(self), ()


class CopiedLock:
    """A lock, `held`, that can be pickled and copied: the copy is another lock."""

    def __init__(self) -> None:
        self.held = threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), ()


# Held while hooks are registered, since two threads may find the same part without them.
_REGISTERING = CopiedLock()


class Site:
    """Memories at a site of one layer, which change what parts of the layer compute, by forward hooks on the parts.

    Hooks read `layer.call`, the call of the layer's forward that runs in this thread.

    Args:
        layer: The host layer, whose memories are built.
        config: Config of the model.
        memories: Memories of the model.
    """

    #: The site, as entries of a config name it.
    name: ClassVar[str]

    def __init__(self, layer: Any, config: Any, memories: Memories):
        self.layer = layer
        # For the path of each part in the layer, the hook, and whether it runs before the part.
        self._hooks: dict[str, tuple[Callable[..., Any], bool]] = {}
        self._hooked: dict[str, Any] = {}  # the module that was last seen at each path

    @staticmethod
    def concerns(entry: MemoryEntry, layer: int) -> bool:
        """Return whether a layer has the site for a memory. Default: the layers that have the memory do."""
        return layer in entry.layers

    @staticmethod
    def is_missing(layer: Any) -> bool:
        """Return whether a layer lacks the part at which memories are to be attached. Default: false."""
        return False

    def hook(self, path: str, hook: Callable[..., Any], *, before: bool = False) -> None:
        """Run a hook, which gets keyword arguments too, behind or before the part of the layer at a path."""
        self._hooks[path] = hook, before

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
            with _REGISTERING.held:
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


def first_of(output: Any) -> torch.Tensor:
    """Return the hidden states in the output of a part, which may be a tuple that begins with them."""
    return output if isinstance(output, torch.Tensor) else output[0]


def with_first(output: Any, hidden_states: torch.Tensor) -> Any:
    """Return the output of a part with other hidden states."""
    return hidden_states if isinstance(output, torch.Tensor) else (hidden_states, *output[1:])


def read_by(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the hidden states that a part was called with."""
    return args[0] if args else kwargs["hidden_states"]
