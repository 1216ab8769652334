"""The parts that were added to a model's base, and contexts in which the model computes without some of them."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from midus_hf.config.memory_entries import NO_MEMORIES, Memories
from midus_hf.look.chapters import one_memory, zero_chapters
from midus_hf.look.watched_models import bare_model, decoder_of, held_hooks, innermost
from midus_hf.memory.protocols import AttendsToDepth

Kind = Literal["block", "layer", "memory", "depth", "chapter", "base"]


@dataclass(frozen=True)
class Part:
    """A part of a model that can be switched off.

    Args:
        kind: `block`: a layer that was inserted for a memory; `layer`: an inserted layer of the family's own kind; `memory`: a
            memory that is attached to layers; `depth`: the reading of the depth by a layer's heads; `chapter`: a chapter of a
            memory, in all layers that read it; `base`: a layer of the base.
        layers: Indices of the decoder layers.
        memory: Name of the attached memory; empty for layers. Default: empty.
        bank: Number of the bank, if the part is a bank that several layers share. Default: None.
        chapter: Number of the chapter, if the part is one. Default: None.
    """

    kind: Kind
    layers: tuple[int, ...]
    memory: str = ""
    bank: int | None = None
    chapter: int | None = None

    def __str__(self) -> str:
        which = ", ".join(map(str, self.layers))
        if self.bank is not None:
            return f"{self.memory} bank {self.bank} (layers {which})"
        if self.chapter is not None:
            return f"{self.memory} chapter {self.chapter}"
        if self.kind == "base":
            return f"layer {which} of the base"
        return f"{self.memory or self.kind} {which}"


@dataclass(frozen=True)
class AddedParts:
    """Parts that were added to a base, and the layers of the base.

    Args:
        parts: Added parts one by one, in the order of layers.
        banks: For each bank that several layers read, one part with all these layers. `parts` has the layers one by one as well.
        base: Layers of the base.
        whole_base: Whether the model has all layers of its base, in their order. If so, and if the base's weights are unchanged,
            the model without all added parts computes the same as the base.
    """

    parts: tuple[Part, ...]
    banks: tuple[Part, ...]
    base: tuple[Part, ...]
    whole_base: bool


def added_parts(model: nn.Module) -> AddedParts:
    """Return the parts that the last upscaling added to a model, or all memories if the config has no record of an upscaling.

    Args:
        model: A causal language model whose decoder has `layers`. It may be compiled, or wrapped by accelerate or PEFT.

    Raises:
        ValueError: If nothing was added.
    """
    blocks = list(enumerate(decoder_of(model).layers))
    config = bare_model(model).config.get_text_config()
    memories: Memories = config.memories() if hasattr(config, "memories") else NO_MEMORIES
    record = getattr(config, "upscale", None) or {}
    inserted = set(record.get("new_layers", memories.inserted))
    names = set(record.get("new_memories", () if record else memories.attached))
    parts: list[Part] = []
    for layer, block in blocks:
        if layer in inserted:
            parts.append(Part("block" if layer in memories.inserted else "layer", (layer,)))
        for name in getattr(block, "sites", {}):
            if name in names and (kind := _kind_attached(block, name)) is not None:
                parts.append(Part(kind, (layer,), name))
    if not parts:
        raise ValueError(
            f"this {config.model_type} model has no layer and no memory that was added to a base; expected one made by upscale."
        )
    banks = [
        Part("memory", tables.layers, name, number)
        for name in memories.attached
        if name in names
        for number, tables in enumerate(memories.tables(name))
        if len(tables.layers) > 1
    ]
    base = tuple(Part("base", (layer,)) for layer, _ in blocks if layer not in inserted)
    return AddedParts(tuple(parts), tuple(banks), base, _has_whole_base(record))


def chapter_parts(model: nn.Module, chapters: Sequence[int] | None = None, memory: str | None = None) -> list[Part]:
    """Return chapters of one memory as parts that can be switched off one by one.

    Args:
        model: A causal language model with chapters.
        chapters: Numbers of the chapters. Default: all chapters.
        memory: Name of the memory, if the model has several memories of chapters. Default: the only one.

    Raises:
        ValueError: If the model has no chapters, or several memories to choose from, or no memory of that name.
    """
    hosts = one_memory(model, memory)
    numbers = range(hosts[0].module.num_chapters) if chapters is None else chapters
    layers = tuple(hosted.layer for hosted in hosts)
    return [Part("chapter", layers, hosts[0].name, chapter=number) for number in numbers]


def _kind_attached(block: Any, name: str) -> Kind | None:
    """Return the kind of part that a memory is in a layer; None if the memory only writes for later layers there."""
    depth = getattr(block, "depth", None)
    if depth is None or depth.name != name:
        return "memory"
    return "depth" if depth.slots else None


def _has_whole_base(record: dict[str, Any]) -> bool:
    plan = record.get("plan")
    if not plan:
        return True
    kept = [entry["base"] for entry in plan if "base" in entry]
    expected = (record.get("base_config") or {}).get("num_hidden_layers", len(kept))
    return kept == list(range(expected))


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
    """
    blocks = decoder_of(model).layers
    with contextlib.ExitStack() as passed_by, held_hooks() as hold:
        for part in parts:
            if part.chapter is not None:
                passed_by.enter_context(zero_chapters(model, [part.chapter], memory=part.memory))
                continue
            for layer in part.layers:
                if part.kind == "memory":
                    passed_by.enter_context(_passed_by(blocks[layer], part.memory))
                elif part.kind == "depth":
                    for module in innermost(blocks[layer].memories[part.memory], AttendsToDepth):
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
    if "sequence" not in kwargs:
        return output
    read, weights = kwargs["sequence"].alone()
    return read, weights
