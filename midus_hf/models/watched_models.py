"""Tools to watch a model: its memories by layer and name, and hooks that are removed afterwards."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.memories.moda.site import DepthHeads


class HostedMemory(NamedTuple):
    """A memory with the layer that hosts it."""

    layer: int
    name: str
    block: Any
    module: Any

    @property
    def place(self) -> str:
        """Layer and name of the memory, such as `3 chapters`, or only the layer for an inserted memory."""
        return f"{self.layer} {self.name}".rstrip()


def hosted_memories(model: nn.Module, *methods: str) -> list[HostedMemory]:
    """Return the memories of a model that have one of some methods, in the order of layers, including PEFT's copies."""
    hosts = []
    layers: Any = decoder_of(model).layers
    for layer, block in enumerate(layers):
        inserted = {"": block.memory} if isinstance(getattr(block, "memory", None), nn.Module) else {}
        memories: dict[str, Any] = {**inserted, **getattr(block, "memories", {})}
        for name, memory in memories.items():
            if not any(hasattr(memory, method) for method in methods):
                continue
            if any(parameter.device.type == "meta" for parameter in memory.parameters()):
                raise RequestError(
                    f"the memory of layer {layer} is offloaded; expected its parameters on a device. Load the model whole."
                )
            hosts.append(HostedMemory(layer, name, block, memory))
    return hosts


def depth_heads(block: Any) -> DepthHeads | None:
    """Return a decoder layer's part in attention over the depth; None if it has none."""
    return next((site for site in getattr(block, "attached", ()) if isinstance(site, DepthHeads)), None)


def lacking(model: Any, part: str) -> RequestError:
    """Return the error that a model has no memory that does something, such as `"reads chapters"`."""
    return RequestError(
        f"this {model.config.model_type} model has no memory that {part}; expected one upscaled with such a memory."
    )


@contextlib.contextmanager
def held_hooks() -> Iterator[Callable[[Any], object]]:
    """Yield a function that takes the handles of hooks, and remove these hooks when the context ends."""
    # Compiled code does not call hooks that were added after compilation.
    with contextlib.ExitStack() as handles, torch.compiler.set_stance("force_eager"):
        yield lambda handle: handles.callback(handle.remove)
