"""Tools to watch a model: memories by their place, hooks that are removed afterwards, and eval mode while a context is open."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from midus_hf.models import parts


class MemoryPlace(NamedTuple):
    """Place of a memory in a model.

    Args:
        layer: Index of the decoder layer.
        name: Name of the attached memory; empty if the layer was inserted for the memory. Default: empty.
    """

    layer: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.name}".rstrip()


@dataclass(frozen=True)
class HostedMemory:
    """A memory with the layer that hosts it.

    Args:
        layer: Index of the decoder layer.
        name: Name of the attached memory; empty if the layer was inserted for the memory.
        block: The decoder layer.
        memory: The memory as the layer calls it, which may be a wrapper of PEFT.
        modules: The memory itself, then all copies that PEFT has made, the newest last. A pass calls one of them.
    """

    layer: int
    name: str
    block: Any
    memory: Any
    modules: tuple[Any, ...]

    @property
    def place(self) -> MemoryPlace:
        """Layer and name of the memory."""
        return MemoryPlace(self.layer, self.name)

    @property
    def module(self) -> Any:
        """The memory itself; if PEFT has copied the memory, the newest copy."""
        return self.modules[-1]


def bare_model(model: nn.Module) -> Any:
    """Return a causal language model without the wrappers of compilation and accelerate; wrappers of PEFT stay."""
    return extract_model_from_parallel(model, keep_torch_compile=False)


def decoder_of(model: nn.Module) -> Any:
    """Return the decoder of a causal language model, which may be compiled, or wrapped by accelerate or PEFT."""
    return parts.decoder_of(bare_model(model))


def hosted_memories(model: nn.Module, kind: type) -> list[HostedMemory]:
    """Return the memories of a model that are of a kind, in the order of layers.

    Args:
        model: A causal language model whose decoder has `layers`. It may be compiled, or wrapped by accelerate or PEFT.
        kind: Protocol of `midus_hf.memory.protocols` that the memories implement.
    """
    return [
        HostedMemory(layer, name, block, memory, modules)
        for layer, block in enumerate(decoder_of(model).layers)
        for name, memory in _memories_of(block)
        if (modules := innermost(memory, kind))
    ]


def _memories_of(block: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(getattr(block, "memory", None), nn.Module):
        yield "", block.memory
    yield from getattr(block, "memories", {}).items()


def innermost(memory: nn.Module, kind: type) -> tuple[nn.Module, ...]:
    """Return the memory itself and all copies that PEFT has made, without PEFT's wrappers around them.

    Args:
        memory: The memory as its layer calls it.
        kind: Protocol of `midus_hf.memory.protocols` that the memory implements.
    """
    matching = [module for module in memory.modules() if isinstance(module, kind)]
    return tuple(
        module
        for module in matching
        if not any(isinstance(part, kind) for part in module.modules() if part is not module)
    )


H = TypeVar("H", bound=HostedMemory)


def whole_and_named(hosts: Sequence[H], name: str | None) -> list[H]:
    """Check that no memory is offloaded, and return the memories that have a name, as `named` does.

    Raises:
        ValueError: If a memory is offloaded, or if no memory has the name.
    """
    for hosted in hosts:
        check_on_device(hosted.memory, hosted.layer)
    return named(hosts, name)


def named(hosts: Sequence[H], name: str | None) -> list[H]:
    """Return the memories that have a name.

    Args:
        hosts: Memories to choose from, one or more.
        name: Name of the memories; None for all.

    Raises:
        ValueError: If no memory has the name.
    """
    names = dict.fromkeys(hosted.name for hosted in hosts)
    if name is not None and name not in names:
        raise ValueError(f"memory is {name!r}; expected one of: {', '.join(names)}.")
    return [hosted for hosted in hosts if name in (None, hosted.name)]


def check_on_device(memory: nn.Module, layer: int | MemoryPlace) -> None:
    """Check that the parameters of a memory are on a device.

    Args:
        memory: Memory to check.
        layer: Layer or place of the memory, for the message.

    Raises:
        ValueError: If a parameter is offloaded.
    """
    if any(parameter.device.type == "meta" for parameter in memory.parameters()):
        raise ValueError(
            f"the memory of layer {layer} is offloaded; expected its parameters on a device. Load the model whole."
        )


@contextlib.contextmanager
def held_hooks() -> Iterator[Callable[[Any], object]]:
    """Yield a function that takes the handles of hooks, and remove these hooks when the context ends.

    All compiled models run uncompiled while the context is open, since compiled code does not call hooks that were added after
    compilation.
    """
    with contextlib.ExitStack() as handles, torch.compiler.set_stance("force_eager"):
        yield lambda handle: handles.callback(handle.remove)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode while the context is open, without gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
