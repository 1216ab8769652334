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


def hosted_memories(
    model: nn.Module, kind: type, lack: str | None = None, name: str | None = None, *, whole: bool = True
) -> list[HostedMemory]:
    """Return the memories of a model that are of a kind, in the order of layers.

    Args:
        model: A causal language model whose decoder has `layers`. It may be compiled, or wrapped by accelerate or PEFT.
        kind: Protocol of `midus_hf.memory.protocols` that the memories implement.
        lack: What a model without these memories has, for the error, as in `"no memory of chapters; expected one with it"`.
            Default: no error, and nothing is checked.
        name: Name of the memories. Default: memories of all names.
        whole: Whether to refuse memories that are offloaded. Default: True.

    Raises:
        ValueError: If no memory is of the kind or has the name, or if a memory is offloaded and `whole` is true.
    """
    hosts = [
        HostedMemory(layer, own_name, block, memory, modules)
        for layer, block in enumerate(decoder_of(model).layers)
        for own_name, memory in _memories_of(block)
        if (modules := innermost(memory, kind))
    ]
    if lack is not None:
        check_hosted(model, hosts, lack, whole)
    return named(hosts, name)


def _memories_of(block: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(getattr(block, "memory", None), nn.Module):
        yield "", block.memory
    yield from getattr(block, "memories", {}).items()


def innermost(memory: nn.Module, kind: type) -> tuple[nn.Module, ...]:
    """Return a memory of a kind, and all copies that PEFT has made, without PEFT's wrappers around them."""
    matching = [module for module in memory.modules() if isinstance(module, kind)]
    return tuple(
        module
        for module in matching
        if not any(isinstance(part, kind) for part in module.modules() if part is not module)
    )


H = TypeVar("H", bound=HostedMemory)


def check_hosted(model: nn.Module, hosts: Sequence[HostedMemory], lack: str, whole: bool = True) -> None:
    """Refuse a model without memories of a kind, and memories that are offloaded, unless `whole` is false.

    Raises:
        ValueError: If there are no `hosts`; the message ends with `lack`. If a parameter of a memory is offloaded.
    """
    if not hosts:
        raise ValueError(f"this {bare_model(model).config.model_type} model has {lack}.")
    for hosted in hosts:
        if whole and any(parameter.device.type == "meta" for parameter in hosted.memory.parameters()):
            raise ValueError(
                f"the memory of layer {hosted.layer} is offloaded; expected its parameters on a device. Load the model whole."
            )


def named(hosts: Sequence[H], name: str | None) -> list[H]:
    """Return the memories that have a name, or all, if the name is None.

    Raises:
        ValueError: If no memory has the name.
    """
    names = dict.fromkeys(hosted.name for hosted in hosts)
    if name is not None and name not in names:
        raise ValueError(f"memory is {name!r}; expected one of: {', '.join(names)}.")
    return [hosted for hosted in hosts if name in (None, hosted.name)]


@contextlib.contextmanager
def held_hooks() -> Iterator[Callable[[Any], object]]:
    """Yield a function that takes the handles of hooks, and remove these hooks when the context ends.

    Compiled code does not call hooks that were added after compilation, so all compiled models run uncompiled meanwhile.
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
