"""Which layers of a model read the depth, which slots each of them reads, and what their memories are called with in a pass."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from midus_hf.analysis.watched_models import (
    HostedMemory,
    bare_model,
    decoder_of,
    held_hooks,
    hosted_memories,
    whole_and_named,
)
from midus_hf.memory.protocols import AttendsToDepth
from midus_hf.memory.routing.token_places import token_places
from midus_hf.ops.depth.op import joint_shares
from midus_hf.ops.dispatch.private_torch import is_in_backward


class ReadSlot(NamedTuple):
    """A slot that a layer reads.

    Args:
        layer: Index of the decoder layer that wrote it.
        source: What wrote it: `attention` or `ffn`.
    """

    layer: int
    source: str

    def __str__(self) -> str:
        return f"{self.layer} {self.source}"


@dataclass(frozen=True)
class DepthReader(HostedMemory):
    """A layer that reads the depth: its `layer`, the `name` that the memory is attached by, the `memory`, and what it reads.

    Args:
        slots: What it reads, from the oldest slot to the newest.
        num_heads: H.
    """

    slots: tuple[ReadSlot, ...]
    num_heads: int


def readers_of_depth(
    model: nn.Module, memory: str | None = None, layers: Sequence[int] | None = None
) -> list[DepthReader]:
    """The layers of a model that read the depth, in their order.

    Args:
        model: A causal language model whose decoder has `layers`, compiled or not, or what accelerate or PEFT has wrapped around
            one.
        memory: Name of one of several memories that read the depth. Default: all.
        layers: Some of them. Default: all.

    Raises:
        ValueError: If there is none, or none of that name, a layer reads no depth, or one is offloaded.
    """
    num_heads = bare_model(model).config.get_text_config().num_attention_heads
    found = [
        DepthReader(**vars(hosted), slots=_slots_of(depth), num_heads=num_heads)
        for hosted in hosted_memories(model, AttendsToDepth)
        if (depth := getattr(hosted.block, "depth", None)) is not None and depth.slots and depth.name == hosted.name
    ]
    if not found:
        model_type = bare_model(model).config.model_type
        raise ValueError(
            f"this {model_type} model has no memory that reads the depth; expected one upscaled with method 'moda'."
        )
    found = whole_and_named(found, memory)
    if layers is None:
        return found
    there = [reader.layer for reader in found]
    for layer in layers:
        if layer not in there:
            raise ValueError(f"layer is {layer}; expected one that reads the depth: {', '.join(map(str, there))}.")
    return [reader for reader in found if reader.layer in layers]


def _slots_of(depth: Any) -> tuple[ReadSlot, ...]:
    return tuple(ReadSlot(depth.layers[slot.writer], slot.source) for slot in depth.options.slots_read(depth.index))


class DepthCall(NamedTuple):
    """One attention to the sequence and the depth.

    Args:
        memory: That attends.
        query: `[B, H, T, d]`.
        given: What it is called with beside queries, by keyword.
        real: `[B, T]`, false for padding; None if no token is padding.
    """

    memory: Any
    query: torch.Tensor
    given: Mapping[str, Any]
    real: torch.Tensor | None

    def shares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what each slot gets, `[B, H, T, n]`, and what the sequence gets, `[B, H, T]`, as `joint_shares` does."""
        sequence, gate = self.given["sequence"], self.memory.gate
        return joint_shares(
            *(self.query, self.given["keys"], sequence.log_sum(), sequence.scaling, sequence.softcap),
            *(None if gate is None else gate[:, None], self.memory.is_added),
        )


Watcher = Callable[[DepthReader, DepthCall], None]


@contextlib.contextmanager
def watch_depth(
    model: nn.Module, memory: str | None, watcher: Callable[[DepthReader, DepthCall], None]
) -> Iterator[None]:
    """Call a function behind each attention to the depth, without gradients, while the context is open.

    Args:
        model: As for `readers_of_depth`. It has hooks more while the context is open.
        memory: Name of one of several memories that read the depth; None for all.
        watcher: What is called.

    Raises:
        ValueError: As `readers_of_depth`.
    """
    real: list[torch.Tensor | None] = [None]

    def before(decoder: Any, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        real[0] = _real_tokens(arguments, given)

    def behind_of(reader: DepthReader) -> Callable[..., None]:
        def behind(memory: Any, arguments: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
            if "sequence" not in given or not arguments[0].numel() or is_in_backward():
                return
            with torch.no_grad():
                watcher(reader, DepthCall(memory, arguments[0], given, real[0]))

        return behind

    readers = readers_of_depth(model, memory)
    with held_hooks() as hold:
        hold(decoder_of(model).register_forward_pre_hook(before, with_kwargs=True))
        for reader in readers:
            for module in reader.modules:
                hold(module.register_forward_hook(behind_of(reader), with_kwargs=True))
        yield


def _real_tokens(arguments: tuple[Any, ...], given: Mapping[str, Any]) -> torch.Tensor | None:
    """`[B, T]`, which tokens of a pass are no padding; None if all are."""
    named = {**dict(zip(("input_ids", "attention_mask"), arguments, strict=False)), **given}
    tokens = named.get("input_ids")
    tokens = named["inputs_embeds"] if tokens is None else tokens
    mask = named.get("token_mask")
    mask = named.get("attention_mask") if mask is None else mask
    return token_places(mask, None, tokens.shape[1], may_hold_documents=False).real
