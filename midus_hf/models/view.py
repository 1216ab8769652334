"""What a loaded model is made of, what `upscale` added to it, and contexts to watch or ablate it."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from midus_hf.anatomy.record import UpscaleRecord, record_of
from midus_hf.config.errors import RequestError
from midus_hf.memories.hierarchical.fetching import Banks
from midus_hf.memories.hosting.layer import without_memories
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.memories.moda.layer import ModaSite
from midus_hf.memories.registry import ATTACHED, NO_MEMORIES, TABLES, Memories


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
    """Return the memories that have one of some methods, in the order of layers, with PEFT's copies."""
    hosts = []
    for layer, block in enumerate(decoder_of(model).layers):
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


def depth_heads(block: Any) -> ModaSite | None:
    """Return a decoder layer's part in attention over the depth; None if it has none."""
    return next((site for site in getattr(block, "site_objects", ()) if isinstance(site, ModaSite)), None)


def lacking(model: Any, part: str) -> RequestError:
    """Return the error for a model without a memory that does something, such as `"reads chapters"`."""
    return RequestError(
        f"this {model.config.model_type} model has no memory that {part}; expected one upscaled with such a memory."
    )


@contextlib.contextmanager
def temporary_hooks() -> Iterator[Callable[[Any], object]]:
    """Yield a function that takes handles of hooks, removed at the end; nothing runs compiled."""
    with contextlib.ExitStack() as handles, torch.compiler.set_stance("force_eager"):
        yield lambda handle: handles.callback(handle.remove)


@dataclass(frozen=True)
class Part:
    """A part of a model that can be switched off.

    Kinds are `block`, a layer inserted for a memory; `layer`, an inserted ordinary layer; `memory`, an attached memory; `depth`, the
    reading of the depth by a layer's heads; `bank`, a memory in all layers that share a bank; and `all` added parts.
    """

    name: str  #: in tables
    kind: str
    layers: tuple[int, ...]
    memory: str = ""  #: name of the attached memory; empty for layers


class ModelView:
    """A loaded model, and what the last upscaling added to its base; valid until its modules change.

    Args:
        model: A causal language model, a model with another head, or either within PEFT, whose decoder has `layers`.
    """

    def __init__(self, model: Any):
        self.model = model
        self.decoder: Any = decoder_of(model)
        self.layers: nn.ModuleList = self.decoder.layers
        recorded = record_of(model.config)
        #: Whether `upscale` made it.
        self.is_upscaled = recorded is not None
        #: What `upscale` recorded in the config; empty for another model.
        self.record = recorded or UpscaleRecord()
        #: Banks that memories fetch blocks from; None if none does.
        self.banks: Banks | None = getattr(model, "banks", None)

    @property
    def adds_bank(self) -> bool:
        """Whether a memory that was added fetches blocks."""
        return self.banks is not None and not self.banks.layouts.keys().isdisjoint(self.record.new_memories)

    @cached_property
    def memories(self) -> Memories:
        """The memories that the config lists."""
        config = self.model.config.get_text_config()
        return config.memories() if hasattr(config, "memories") else NO_MEMORIES

    @cached_property
    def new_modules(self) -> dict[str, nn.Module]:
        """Added layers and memories, and tables that layers share, by name; may be empty.

        Raises:
            RequestError: If the record names a layer or a memory that the model does not have.
        """
        outside = [layer for layer in self.record.new_layers if not 0 <= layer < len(self.layers)]
        if outside:
            raise RequestError(
                f"upscale.new_layers of the config names {outside}, which the model does not have. Upscale the base again."
            )
        modules = dict(self.model.named_modules())
        name_of_stack = next(name for name, module in modules.items() if module is self.layers)
        new: dict[str, nn.Module] = {
            f"{name_of_stack}.{layer}": self.layers[layer] for layer in sorted(self.record.new_layers)
        }
        for memory in self.record.new_memories:
            attached = {
                name: module
                for name, module in modules.items()
                if name.endswith(f".{ATTACHED}.{memory}") or name.rpartition(".")[0].endswith(f".{TABLES}.{memory}")
            }
            if not attached:
                raise RequestError(
                    f"upscale.new_memories of the config names {memory!r}, which the model does not have. Upscale the base again."
                )
            new |= attached
        return new

    @property
    def task_head(self) -> list[nn.Module]:
        """Modules of a head that the base lacks; none for a language model or a bare stack."""
        if self.decoder is self.model or self.model.get_output_embeddings() is not None:
            return []
        return [module for module in self.model.children() if module is not self.decoder]

    @cached_property
    def parts(self) -> list[Part]:
        """Added parts, or all memories without a record, by layers, then banks of several layers.

        Raises:
            RequestError: If nothing was added.
        """
        inserted = {*(self.record.new_layers if self.is_upscaled else self.memories.inserted)}
        names = {*(self.record.new_memories if self.is_upscaled else self.memories.attached)}
        parts: list[Part] = []
        for layer, block in enumerate(self.layers):
            if layer in inserted:
                kind = "block" if layer in self.memories.inserted else "layer"
                parts.append(Part(f"{kind} {layer}", kind, (layer,)))
            for name in getattr(block, "sites", {}):
                depth = depth_heads(block)
                reads_depth = depth is not None and depth.memory == name
                only_writes = depth is not None and reads_depth and not depth.slots  # for later layers
                if name in names and not only_writes:
                    parts.append(Part(f"{name} {layer}", "depth" if reads_depth else "memory", (layer,), name))
        if not parts:
            raise RequestError(
                f"this {self.model.config.model_type} model has no layer and no memory that was added to a base; expected one made "
                "by upscale."
            )
        for name in filter(names.__contains__, self.memories.attached):
            for number, tables in enumerate(self.memories.tables(name)):
                if len(tables.layers) > 1:
                    label = f"{name} bank {number} (layers {', '.join(map(str, tables.layers))})"
                    parts.append(Part(label, "bank", tables.layers, name))
        return parts


def has_adapters(model: Any) -> bool:
    """Return whether PEFT has wrapped a model, which may be of any kind; PEFT need not be installed."""
    return hasattr(model, "peft_config")


@contextlib.contextmanager
def switched_off(model: Any, parts: Iterable[Part]) -> Iterator[None]:
    """Run a model without some of its parts within the context.

    A layer passes the residual stream on unchanged, a memory is skipped, heads that read the depth read only the sequence. What a
    layer writes for others is kept: slots of the depth, and the output of a memory that skips layers. All compiled models run
    uncompiled.

    Args:
        model: A model as in `ModelView`.
        parts: Parts to switch off, of `ModelView.parts`.

    Raises:
        RequestError: If the model lacks a part, or parameters of heads that read the depth are offloaded.
    """
    blocks = decoder_of(model).layers
    readers = hosted_memories(model, "attend")
    parts = list(parts)
    for part in parts:
        for layer in part.layers:
            if layer >= len(blocks) or (part.memory and part.memory not in getattr(blocks[layer], "sites", {})):
                raise RequestError(
                    f"part is {part.name!r}, and the model has no {part.memory or 'decoder'} layer {layer}; expected a part of this "
                    "model, as ModelView.parts lists them."
                )
    with contextlib.ExitStack() as skipped, temporary_hooks() as hold:
        for part in parts:
            for layer in part.layers:
                if part.kind in ("memory", "bank"):
                    skipped.enter_context(without_memories([blocks[layer]], [part.memory]))
                elif part.kind == "depth":
                    (module,) = (one.module for one in readers if (one.layer, one.name) == (layer, part.memory))
                    hold(module.register_forward_hook(_sequence_alone, with_kwargs=True))
                else:
                    hold(blocks[layer].register_forward_hook(_residual_alone, with_kwargs=True))
        yield


def _residual_alone(layer: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return a layer's input in place of its output. Other outputs, for later layers, are unchanged."""
    residual = arguments[0] if arguments else kwargs["hidden_states"]
    return (residual, *output[1:]) if isinstance(output, tuple) else residual


def _sequence_alone(memory: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return the output of heads that read only the sequence; a call that writes a slot is unchanged."""
    return kwargs["sequence"].attend_to_sequence() if "sequence" in kwargs else output
