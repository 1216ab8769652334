"""Readers of the depth: the layers that read it, the slots that each layer reads, and the calls of their memories in a pass."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from midus_hf.analysis.watched_models import (
    HostedMemory,
    bare_model,
    check_hosted,
    decoder_of,
    held_hooks,
    hosted_memories,
    named,
)
from midus_hf.memory.protocols import AttendsToDepth
from midus_hf.memory.routing.token_places import token_places
from midus_hf.ops.depth.op import joint_shares
from midus_hf.ops.dispatch.private_torch import is_in_backward


class ReadSlot(NamedTuple):
    """A slot that a layer reads.

    Args:
        layer: Index of the decoder layer that wrote the slot.
        source: Part of the layer that the slot comes from: `attention` or `ffn`.
    """

    layer: int
    source: str

    def __str__(self) -> str:
        return f"{self.layer} {self.source}"


@dataclass(frozen=True)
class DepthReader(HostedMemory):
    """A layer that reads the depth, with its memory. The other fields are described in `HostedMemory`.

    Args:
        slots: Slots that the layer reads, from the oldest to the newest.
        num_heads: H, the number of query heads.
    """

    slots: tuple[ReadSlot, ...]
    num_heads: int


def readers_of_depth(
    model: nn.Module, memory: str | None = None, layers: Sequence[int] | None = None
) -> list[DepthReader]:
    """Return the layers of a model that read the depth, in the order of layers.

    Args:
        model: A causal language model whose decoder has `layers`. It may be compiled, or wrapped by accelerate or PEFT.
        memory: Name of the memory that reads the depth. Default: memories of all names.
        layers: Indices of the decoder layers to return. Default: all layers that read the depth.

    Raises:
        ValueError: If no memory reads the depth or has the name, if one of `layers` does not read the depth, or if a memory is
            offloaded.
    """
    num_heads = bare_model(model).config.get_text_config().num_attention_heads
    readers = [
        DepthReader(**vars(hosted), slots=_slots_of(depth), num_heads=num_heads)
        for hosted in hosted_memories(model, AttendsToDepth)
        if (depth := getattr(hosted.block, "depth", None)) is not None and depth.slots and depth.name == hosted.name
    ]
    check_hosted(model, readers, "no memory that reads the depth; expected one upscaled with method 'moda'")
    readers = named(readers, memory)
    if layers is None:
        return readers
    by_layer = {reader.layer: reader for reader in readers}
    for layer in layers:
        if layer not in by_layer:
            raise ValueError(f"layer is {layer}; expected one that reads the depth: {', '.join(map(str, by_layer))}.")
    return [reader for reader in readers if reader.layer in layers]


def _slots_of(depth: Any) -> tuple[ReadSlot, ...]:
    return tuple(ReadSlot(depth.layers[slot.writer], slot.source) for slot in depth.options.slots_read(depth.index))


class DepthCall(NamedTuple):
    """One call of a memory that attends to the sequence and the depth.

    Args:
        memory: The memory module that is called.
        query: Queries, `[B, H, T, d]`.
        kwargs: Keyword arguments of the call.
        real: `[B, T]`, false for padding; None if no token is padding.
    """

    memory: Any
    query: torch.Tensor
    kwargs: Mapping[str, Any]
    real: torch.Tensor | None

    def shares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the share of each slot, `[B, H, T, n]`, and the share of the sequence, `[B, H, T]`, as `joint_shares` does."""
        sequence, gate = self.kwargs["sequence"], self.memory.gate
        return joint_shares(
            *(self.query, self.kwargs["keys"], sequence.log_sum(), sequence.scaling, sequence.softcap),
            *(None if gate is None else gate[:, None], self.memory.is_added),
        )


@contextlib.contextmanager
def watch_depth(
    model: nn.Module, memory: str | None, watcher: Callable[[DepthReader, DepthCall], None]
) -> Iterator[None]:
    """Call a function after each attention to the depth, without gradients, while the context is open."""
    real: list[torch.Tensor | None] = [None]

    def before(decoder: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        real[0] = _real_tokens(arguments, kwargs)

    def behind_of(reader: DepthReader) -> Callable[..., None]:
        def behind(memory: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if "sequence" not in kwargs or not arguments[0].numel() or is_in_backward():
                return
            with torch.no_grad():
                watcher(reader, DepthCall(memory, arguments[0], kwargs, real[0]))

        return behind

    readers = readers_of_depth(model, memory)
    with held_hooks() as hold:
        hold(decoder_of(model).register_forward_pre_hook(before, with_kwargs=True))
        for reader in readers:
            for module in reader.modules:
                hold(module.register_forward_hook(behind_of(reader), with_kwargs=True))
        yield


def _real_tokens(arguments: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return which tokens of a pass are not padding, `[B, T]`; None if no token is padding."""
    named = {**dict(zip(("input_ids", "attention_mask"), arguments, strict=False)), **kwargs}
    tokens = named.get("input_ids")
    tokens = named["inputs_embeds"] if tokens is None else tokens
    mask = named.get("token_mask")
    mask = named.get("attention_mask") if mask is None else mask
    return token_places(mask, None, tokens.shape[1], may_hold_documents=False).real
