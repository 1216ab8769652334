"""A model that is watched: its memories by place, hooks that are removed afterwards, and eval mode for as long as it lasts."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn


class MemoryPlace(NamedTuple):
    """A layer, and which of its memories.

    Args:
        layer: Index of the decoder layer.
        name: That the memory is attached by; empty where the layer was inserted for it.
    """

    layer: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.name}".rstrip()


@dataclass(frozen=True)
class HostedMemory:
    """A memory in a layer.

    Args:
        layer: Index of the decoder layer.
        name: That the memory is attached by; empty where the layer was inserted for it.
        block: The decoder layer.
        memory: The memory, or what PEFT has wrapped around it.
        modules: The memory itself, and every copy of it that PEFT has made, the newest last: one of them is called.
    """

    layer: int
    name: str
    block: Any
    memory: Any
    modules: tuple[Any, ...]

    @property
    def place(self) -> MemoryPlace:
        """The layer and the name."""
        return MemoryPlace(self.layer, self.name)

    @property
    def module(self) -> Any:
        """The memory itself; where PEFT has copied it, the newest copy."""
        return self.modules[-1]


def bare_model(model: nn.Module) -> Any:
    """Return the causal language model that compilation or accelerate has wrapped; what PEFT has wrapped is returned as it is."""
    return extract_model_from_parallel(model, keep_torch_compile=False)


def decoder_of(model: nn.Module) -> Any:
    """Return the decoder of a causal language model, compiled or not, or of what accelerate or PEFT has wrapped around one."""
    return bare_model(model).get_decoder()


def hosted_memories(model: nn.Module, kind: type) -> list[HostedMemory]:
    """Return the memories of a model that are of a kind, in the order of layers.

    Args:
        model: A causal language model whose decoder has `layers`, compiled or not, or what accelerate or PEFT has wrapped around one.
        kind: What a memory is told by: a protocol of `midus_hf.memory.protocols`.
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
    """Return the memory itself and every copy of it that PEFT has made; a wrapper, which has what it wraps, is none of them.

    Args:
        memory: In its layer, as a layer calls it.
        kind: What a memory is told by: a protocol of `midus_hf.memory.protocols`.
    """
    matching = [module for module in memory.modules() if isinstance(module, kind)]
    return tuple(
        module
        for module in matching
        if not any(isinstance(part, kind) for part in module.modules() if part is not module)
    )


H = TypeVar("H", bound=HostedMemory)


def whole_and_named(hosts: Sequence[H], name: str | None) -> list[H]:
    """Return what `named` does of memories that are all there.

    Raises:
        ValueError: If one is offloaded, or none has the name.
    """
    for hosted in hosts:
        check_on_device(hosted.memory, hosted.layer)
    return named(hosts, name)


def named(hosts: Sequence[H], name: str | None) -> list[H]:
    """Return the memories of one name, or all of them.

    Args:
        hosts: One or more.
        name: Of the memory; None for any.

    Raises:
        ValueError: If none has the name.
    """
    names = dict.fromkeys(hosted.name for hosted in hosts)
    if name is not None and name not in names:
        raise ValueError(f"memory is {name!r}; expected one of: {', '.join(names)}.")
    return [hosted for hosted in hosts if name in (None, hosted.name)]


def check_on_device(memory: nn.Module, layer: int | MemoryPlace) -> None:
    """See that a memory has its parameters.

    Args:
        memory: The memory.
        layer: Where it is, for the message.

    Raises:
        ValueError: If one is offloaded.
    """
    if any(parameter.device.type == "meta" for parameter in memory.parameters()):
        raise ValueError(
            f"the memory of layer {layer} is offloaded; expected its parameters on a device. Load the model whole."
        )


@contextlib.contextmanager
def held_hooks() -> Iterator[Callable[[Any], object]]:
    """Hold hooks until the context ends: it gives a function that takes the handle of each, and removes them then.

    What `torch.compile` has compiled, of any model, runs uncompiled while the context is open: compiled code does not call a hook
    that came after it.
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
