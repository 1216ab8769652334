"""The parts that were added to a model's base, and contexts in which the model computes without some of them."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from midus_hf.anatomy.record import record_of
from midus_hf.memories.entries import NO_MEMORIES, Memories
from midus_hf.memories.hosting.layer import without_memories
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.models.watched_models import depth_heads, held_hooks, hosted_memories


@dataclass(frozen=True)
class Part:
    """A part of a model that can be switched off.

    Args:
        name: Name of the part in tables.
        kind: `block`: a layer that was inserted for a memory; `layer`: an inserted ordinary layer of the family; `memory`: a
            memory that is attached to layers; `depth`: the reading of the depth by a layer's heads; `bank`: a memory in all layers
            that share a bank; `all`: all added parts together.
        layers: Indices of the decoder layers.
        memory: Name of the attached memory; empty for layers. Default: empty.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    memory: str = ""


def added_parts(model: Any) -> list[Part]:
    """Return the parts that the last upscaling added to a model, or all memories if the config has no record of an upscaling.

    Parts are listed one by one in the order of layers, then banks that several layers share, whose layers are listed as well.

    Args:
        model: A causal language model whose decoder has `layers`.

    Raises:
        ValueError: If nothing was added.
    """
    config = model.config.get_text_config()
    memories: Memories = config.memories() if hasattr(config, "memories") else NO_MEMORIES
    record = record_of(config)
    inserted = {*(memories.inserted if record is None else record.new_layers)}
    names = {*(memories.attached if record is None else record.new_memories)}
    parts: list[Part] = []
    for layer, block in enumerate(decoder_of(model).layers):
        if layer in inserted:
            kind = "block" if layer in memories.inserted else "layer"
            parts.append(Part(f"{kind} {layer}", kind, (layer,)))
        for name in getattr(block, "sites", {}):
            depth = depth_heads(block)
            reads_depth = depth is not None and depth.memory == name
            only_writes = depth is not None and reads_depth and not depth.slots  # for later layers
            if name in names and not only_writes:
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


@contextlib.contextmanager
def switched_off(model: Any, parts: Iterable[Part]) -> Iterator[None]:
    """Run a model without some of its parts within the context.

    A layer passes the residual stream on unchanged. A memory is skipped, like a fetching memory for which nothing was fetched.
    Heads that read the depth read only the sequence. What a layer writes for other layers is kept: slots of the depth, and the
    output of a memory that skips layers. Parameters do not change; modules have additional hooks within the context, and
    all compiled models, not only this one, run uncompiled.

    Args:
        model: A model as in `added_parts`.
        parts: Parts to switch off, as `added_parts` returns them.

    Raises:
        ValueError: If the model lacks a part, or parameters of heads that read the depth are offloaded.
    """
    blocks, readers = decoder_of(model).layers, hosted_memories(model, "attend")
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
            for layer in part.layers:
                if part.kind in ("memory", "bank"):
                    passed_by.enter_context(without_memories([blocks[layer]], [part.memory]))
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
    """Return the output of heads that read only the sequence. The output of a call that writes a slot is unchanged."""
    return kwargs["sequence"].alone() if "sequence" in kwargs else output
