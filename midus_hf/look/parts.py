"""The parts that were added to a model's base, and contexts in which the model computes without some of them."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from midus_hf.config.memory_entries import NO_MEMORIES, Memories
from midus_hf.look.watched_models import (
    bare_model,
    decoder_of,
    depth_heads,
    held_hooks,
    hosted_memories,
    lacking,
    layers_of,
)
from midus_hf.memory.protocols import AttendsToDepth, ReadsChapters

# Names of the tensors of a bank of chapters that have one row per memory token.
_BANK_ROWS = ("bank", "bank_integers", "bank_scales")


@dataclass(frozen=True)
class Part:
    """A part of a model that can be switched off.

    Args:
        name: Name of the part in tables.
        kind: `block`: a layer that was inserted for a memory; `layer`: an inserted layer of the family's own kind; `memory`: a
            memory that is attached to layers; `depth`: the reading of the depth by a layer's heads; `bank`: a memory in all layers
            that share a bank; `chapter`: a chapter of a memory, in all layers that read it; `all`: all added parts together.
        layers: Indices of the decoder layers.
        memory: Name of the attached memory; empty for layers. Default: empty.
        chapter: Number of the chapter, if the part is one. Default: None.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    memory: str = ""
    chapter: int | None = None


def added_parts(model: nn.Module) -> list[Part]:
    """Return the parts that the last upscaling added to a model, or all memories if the config has no record of an upscaling.

    Parts are listed one by one in the order of layers, then banks that several layers share, whose layers are listed as well.

    Args:
        model: A causal language model whose decoder has `layers`. It may be compiled, or wrapped by accelerate or PEFT.

    Raises:
        ValueError: If nothing was added.
    """
    config = bare_model(model).config.get_text_config()
    memories: Memories = config.memories() if hasattr(config, "memories") else NO_MEMORIES
    record = getattr(config, "upscale", None) or {}
    inserted = set(record.get("new_layers", memories.inserted))
    names = set(record.get("new_memories", () if record else memories.attached))
    parts: list[Part] = []
    for layer, block in enumerate(layers_of(model)):
        if layer in inserted:
            kind = "block" if layer in memories.inserted else "layer"
            parts.append(Part(f"{kind} {layer}", kind, (layer,)))
        for name in getattr(block, "sites", {}):
            depth = depth_heads(block)
            reads_depth = depth is not None and depth.memory == name
            if name in names and not (
                depth is not None and reads_depth and not depth.slots
            ):  # which only writes for later layers
                parts.append(Part(f"{name} {layer}", "depth" if reads_depth else "memory", (layer,), name))
    if not parts:
        raise ValueError(
            f"this {config.model_type} model has no layer and no memory that was added to a base; expected one made by upscale."
        )
    for name in filter(names.__contains__, memories.attached):
        for number, tables in enumerate(memories.tables(name)):
            if len(tables.layers) > 1:
                label = f"{name} bank {number} (layers {', '.join(map(str, tables.layers))})"
                parts.append(Part(label, "bank", tables.layers, name))
    return parts


def has_whole_base(model: nn.Module) -> bool:
    """Return whether a model has all layers of its base, in their order.

    If so, and if the base's weights are unchanged, the model without all added parts computes the same as the base.
    """
    record = getattr(bare_model(model).config.get_text_config(), "upscale", None) or {}
    kept = [entry["base"] for entry in record.get("plan") or () if "base" in entry]
    return not kept or kept == list(range((record.get("base_config") or {}).get("num_hidden_layers", len(kept))))


def chapter_parts(model: nn.Module) -> list[Part]:
    """Return the chapters of all memories of a model as parts that can be switched off one by one.

    Raises:
        ValueError: If the model has no chapters.
    """
    hosts = hosted_memories(model, ReadsChapters)
    if not hosts:
        raise lacking(model, "reads chapters")
    parts = []
    for name, count in {hosted.name: hosted.module.num_chapters for hosted in hosts}.items():
        layers = tuple(hosted.layer for hosted in hosts if hosted.name == name)
        parts += [Part(f"{name} chapter {number}", "chapter", layers, name, number) for number in range(count)]
    return parts


@contextlib.contextmanager
def switched_off(model: nn.Module, parts: Iterable[Part]) -> Iterator[None]:
    """Let a model compute without some of its parts while the context is open.

    A layer passes the residual stream on unchanged. A memory is skipped, like a fetching memory for which nothing was fetched.
    A chapter's rows are zero, and routers still open it. Heads that read the depth read the sequence alone. What a layer writes
    for other layers is kept: slots of the depth, and the output of a memory that skips layers. Parameters change for chapters
    alone, and are restored bit for bit; modules have additional hooks while the context is open, and compiled models run
    uncompiled, this one and all others.

    Args:
        model: A model as in `added_parts`.
        parts: Parts to switch off, as `added_parts` and `chapter_parts` return them.

    Raises:
        ValueError: If the model has no such part; as `zero_chapters`.
    """
    blocks, readers = layers_of(model), hosted_memories(model, AttendsToDepth)
    parts = list(parts)
    for part in parts:
        for layer in part.layers:
            if layer >= len(blocks) or (part.memory and part.memory not in getattr(blocks[layer], "sites", {})):
                raise ValueError(
                    f"part is {part.name!r}, and the model has no {part.memory or 'decoder'} layer {layer}; expected a part of this "
                    "model, as added_parts returns them."
                )
    with contextlib.ExitStack() as passed_by, held_hooks() as hold:
        for part in parts:
            if part.chapter is not None:
                passed_by.enter_context(zero_chapters(model, [part.chapter], memory=part.memory))
                continue
            for layer in part.layers:
                if part.kind in ("memory", "bank"):
                    passed_by.enter_context(_passed_by(blocks[layer], part.memory))
                elif part.kind == "depth":
                    (module,) = (one.module for one in readers if (one.layer, one.name) == (layer, part.memory))
                    hold(module.register_forward_hook(_sequence_alone, with_kwargs=True))
                else:
                    hold(blocks[layer].register_forward_hook(_residual_alone, with_kwargs=True))
        yield


@contextlib.contextmanager
def _passed_by(block: Any, name: str) -> Iterator[None]:
    """Take a memory out of a layer's `sites`, which every pass looks up, so that the layer skips the memory."""
    before = block.sites
    block.sites = {other: site for other, site in before.items() if other != name}
    try:
        yield
    finally:
        block.sites = before


def _residual_alone(layer: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return a layer's input in place of its output. What else the layer outputs, for later layers, is unchanged."""
    residual = arguments[0] if arguments else kwargs["hidden_states"]
    return (residual, *output[1:]) if isinstance(output, tuple) else residual


def _sequence_alone(memory: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return the output of heads that read the sequence alone. The output of a call that writes a slot is unchanged."""
    return kwargs["sequence"].alone() if "sequence" in kwargs else output


@contextlib.contextmanager
def zero_chapters(model: nn.Module, chapters: Sequence[int], *, memory: str | None = None) -> Iterator[None]:
    """Set the rows of chapters to zero while the context is open. Afterwards the rows are restored, bit for bit.

    Routers still open the chapters, and attention still gives them a share, so a measurement shows what their contents do.

    Args:
        model: A causal language model with chapters. It may be compiled, or wrapped by accelerate or PEFT. Its parameters must
            not be trained while the context is open.
        chapters: Numbers of the chapters.
        memory: Name of the memory, if the model has several memories of chapters. Default: the only one.

    Raises:
        ValueError: If the model has no chapters or several memories to choose from; if the memory or a chapter does not exist;
            if parameters are offloaded, sharded, or in use by `kept_values`.
    """
    banks, rows = _rows_of(model, chapters, memory)
    before = [bank.detach()[rows.to(bank.device)].clone() for bank in banks]
    try:
        with torch.no_grad():
            for bank in banks:
                bank[rows.to(bank.device)] = 0
        yield
    finally:
        with torch.no_grad():
            for bank, values in zip(banks, before, strict=True):
                bank[rows.to(bank.device)] = values


def _rows_of(model: nn.Module, chapters: Sequence[int], memory: str | None) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the tensors of a memory's banks with a row per memory token, and the indices of the chapters' rows.

    The tensors are parameters, or buffers if they hold integers.
    """
    hosts = hosted_memories(model, ReadsChapters)
    if not hosts:
        raise lacking(model, "reads chapters")
    names = {hosted.name: hosted.module.options for hosted in hosts}
    name = next(iter(names)) if memory is None and len(names) == 1 else memory
    if name not in names:
        raise ValueError(f"memory is {memory!r}; expected one of: {', '.join(names)}.")
    options = names[name]
    for number in chapters:
        if not 0 <= number < options.chapters:
            raise ValueError(f"chapter is {number}; expected a number from 0 to {options.chapters - 1}.")
    if any(getattr(hosted.module, "kept", None) is not None and not hosted.module.kept.is_empty for hosted in hosts):
        raise ValueError(
            f"kept_values keeps what memory {name!r} derives from its bank; expected to be outside of it. Open kept_values within."
        )
    # The memory's module, the model's tables that its layers share, and copies of both that PEFT has made.
    holders = [module for path, module in decoder_of(model).named_modules() if name in path.split(".")]
    banks = [
        tensor
        for module in holders
        for row in _BANK_ROWS
        if (tensor := {**module._parameters, **module._buffers}.get(row)) is not None
    ]
    num_rows = options.chapters * options.chapter_tokens
    if any(bank.device.type == "meta" or isinstance(bank, DTensor) or len(bank) != num_rows for bank in banks):
        raise ValueError(
            f"a bank of memory {name!r} is offloaded or sharded; expected it whole, on a device. Load the model in one process."
        )
    rows = torch.tensor(list(chapters))[:, None] * options.chapter_tokens + torch.arange(options.chapter_tokens)
    return banks, rows.flatten()
