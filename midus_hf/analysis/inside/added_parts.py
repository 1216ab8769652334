"""Which parts of a model were added to its base, and the model without some of them, for as long as a context is open."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from midus_hf.analysis.watched_models import bare_model, decoder_of, held_hooks, innermost
from midus_hf.config.memory_entries import NO_MEMORIES, Memories
from midus_hf.memory.protocols import AttendsToDepth

Kind = Literal["block", "layer", "memory", "depth", "base"]


@dataclass(frozen=True)
class Part:
    """A part of a model that can be switched off.

    Args:
        kind: `block`: a layer that was inserted for a memory; `layer`: one of the family's own kind that was inserted; `memory`: what
            is attached to layers; `depth`: what their heads read of the depth; `base`: a layer of the base.
        layers: Indices of the decoder layers.
        memory: Name that a memory is attached by; empty for layers. Default: empty.
        bank: Which of the tables that layers share, where that is what the part is. Default: none.
    """

    kind: Kind
    layers: tuple[int, ...]
    memory: str = ""
    bank: int | None = None

    def __str__(self) -> str:
        which = ", ".join(map(str, self.layers))
        if self.bank is not None:
            return f"{self.memory} bank {self.bank} (layers {which})"
        if self.kind == "base":
            return f"layer {which} of the base"
        return f"{self.memory or self.kind} {which}"


@dataclass(frozen=True)
class AddedParts:
    """What was added to a base.

    Args:
        parts: One by one, in the order of layers.
        banks: Those of several layers that read one bank, together; the same layers are in `parts` as well.
        base: The layers of the base.
        whole_base: Whether the model without all parts computes what its base does, as far as weights are the base's: it has all
            layers of the base, in their order.
    """

    parts: tuple[Part, ...]
    banks: tuple[Part, ...]
    base: tuple[Part, ...]
    whole_base: bool


def added_parts(model: nn.Module) -> AddedParts:
    """What the last upscaling added to a model; all of its memories where nothing is recorded.

    Args:
        model: A causal language model whose decoder has `layers`, compiled or not, or what accelerate or PEFT has wrapped around one.

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


def _kind_attached(block: Any, name: str) -> Kind | None:
    """What a memory is in a layer; None where it does nothing there but write for later layers."""
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

    A layer passes the residual stream on as it came. A memory is passed by, as one that fetches is where nothing was fetched; heads
    that read the depth read the sequence alone. What such a layer writes for others stays: slots of the depth, what a memory that
    skips layers gives. No parameter changes; modules have hooks more while the context is open. What `torch.compile` has
    compiled, of this model or another, runs uncompiled meanwhile.

    Args:
        model: As for `added_parts`.
        parts: From `added_parts`.
    """
    blocks = decoder_of(model).layers
    with contextlib.ExitStack() as passed_by, held_hooks() as hold:
        for part in parts:
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
    """A layer looks up where its memories sit in every pass; without a site there is nothing to read."""
    before = block.sites
    block.sites = {other: site for other, site in before.items() if other != name}
    try:
        yield
    finally:
        block.sites = before


def _residual_alone(layer: Any, arguments: tuple[Any, ...], given: dict[str, Any], output: Any) -> Any:
    """What the layer was given, and what it gives for later layers as it is."""
    residual = arguments[0] if arguments else given["hidden_states"]
    return (residual, *output[1:]) if isinstance(output, tuple) else residual


def _sequence_alone(memory: Any, arguments: tuple[Any, ...], given: dict[str, Any], output: Any) -> Any:
    """What heads give where they attend; a slot that is written is left as it is."""
    if "sequence" not in given:
        return output
    read, weights = given["sequence"].alone()
    return read, weights
