"""Tools to watch a model: its memories by layer and name, hooks that are removed afterwards, and eval mode for a while."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from midus_hf.models import parts
from midus_hf.models.depth_heads import DepthHeads


class HostedMemory(NamedTuple):
    """A memory with the layer that hosts it.

    Args:
        layer: Index of the decoder layer.
        name: Name of the attached memory; empty if the layer was inserted for the memory.
        block: The decoder layer.
        module: The memory; if PEFT has copied the memory, the copy of the active adapter, which a pass calls.
    """

    layer: int
    name: str
    block: Any
    module: Any

    @property
    def place(self) -> str:
        """Layer and name of the memory, such as `3 chapters`, or the layer alone of a memory with its own layer."""
        return f"{self.layer} {self.name}".rstrip()


def bare_model(model: nn.Module) -> Any:
    """Return a causal language model without the wrappers of compilation and accelerate; wrappers of PEFT stay."""
    return extract_model_from_parallel(model, keep_torch_compile=False)


def decoder_of(model: nn.Module) -> Any:
    """Return the decoder of a causal language model, which may be compiled, or wrapped by accelerate or PEFT."""
    return parts.decoder_of(bare_model(model))


def _called(module: Any) -> Any:
    """Return a module, or in place of PEFT's wrapper of a module and its copies the one that a pass calls."""
    while "modules_to_save" in module._modules and "original_module" in module._modules:
        adapter = next(iter(module.active_adapters), None)
        is_copied = adapter in module.modules_to_save and not module.disable_adapters
        module = module.modules_to_save[adapter] if is_copied else module.original_module
    return module


def layers_of(model: nn.Module) -> list[Any]:
    """Return the decoder layers that a pass calls, of a model as `decoder_of` takes it."""
    return [_called(layer) for layer in decoder_of(model).layers]


def hosted_memories(model: nn.Module, *kinds: type) -> list[HostedMemory]:
    """Return the memories of a model that are of one of some kinds, in the order of layers.

    Args:
        model: A causal language model whose decoder has `layers`. It may be compiled, or wrapped by accelerate or PEFT.
        *kinds: Protocols of `midus_hf.memory.protocols`, of which the memories implement one.

    Raises:
        ValueError: If a parameter of one of these memories is offloaded.
    """
    hosts = []
    for layer, block in enumerate(layers_of(model)):
        own = {"": block.memory} if isinstance(getattr(block, "memory", None), nn.Module) else {}
        for name, memory in {**own, **getattr(block, "memories", {})}.items():
            called = _called(memory)
            if not isinstance(called, kinds):
                continue
            if any(parameter.device.type == "meta" for parameter in memory.parameters()):
                raise ValueError(
                    f"the memory of layer {layer} is offloaded; expected its parameters on a device. Load the model whole."
                )
            hosts.append(HostedMemory(layer, name, block, called))
    return hosts


def depth_heads(block: Any) -> DepthHeads | None:
    """Return a decoder layer's part in attention over the depth; None if it has none."""
    return next((site for site in getattr(block, "stands", ()) if isinstance(site, DepthHeads)), None)


def lacking(model: nn.Module, part: str) -> ValueError:
    """Return the error that a model has no memory that does something, such as `"reads chapters"`."""
    return ValueError(
        f"this {bare_model(model).config.model_type} model has no memory that {part}; expected one upscaled with such a memory."
    )


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
