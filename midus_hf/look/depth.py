"""Attention to the depth: how heads divide their attention between the sequence and the slots that earlier layers wrote."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from midus_hf.look.watched_models import (
    HostedMemory,
    MemoryPlace,
    bare_model,
    check_hosted,
    decoder_of,
    evaluating,
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


class DepthSums:
    """Sums over tokens of the shares of some heads of one layer, float64."""

    def __init__(self, reader: DepthReader, heads: Sequence[int]):
        self.reader, self.heads = reader, tuple(heads)
        self.tokens = torch.zeros((), dtype=torch.float64)
        self.shares = torch.zeros(len(self.heads), len(reader.slots), dtype=torch.float64)  # [heads, m]
        self.of_sequence = torch.zeros(len(self.heads), dtype=torch.float64)
        self.gates = torch.ones(len(self.heads), dtype=torch.float64)  # c, in the latest pass

    def add(self, call: DepthCall) -> None:
        """Add the tokens of a pass to the sums."""
        shares, of_sequence = call.shares()
        real, gate = call.real, call.memory.gate
        device = shares.device
        heads = torch.tensor(self.heads, device=device)
        of_slots, of_sequence = (part.index_select(1, heads).double() for part in (shares, of_sequence))
        if real is not None:
            padding = ~real.to(device)[:, None]
            of_slots, of_sequence = of_slots.masked_fill(padding[..., None], 0), of_sequence.masked_fill(padding, 0)
        num_tokens = shares.shape[0] * shares.shape[2] if real is None else real.sum().to(device)
        self.tokens = self.tokens.to(device) + num_tokens
        self.shares = self.shares.to(device) + of_slots.sum((0, 2))
        self.of_sequence = self.of_sequence.to(device) + of_sequence.sum((0, 2))
        if gate is not None:
            self.gates = gate.index_select(0, heads).double()


class DepthRecords:
    """Sums that were recorded, per place of a memory.

    Args:
        sums: Sums of each recorded layer, by the place of its memory.
    """

    def __init__(self, sums: Mapping[MemoryPlace, DepthSums]):
        self.sums = dict(sums)


@contextlib.contextmanager
def record_depth(
    model: nn.Module,
    memory: str | None = None,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Iterator[DepthRecords]:
    """Record, while the context is open, how each head divides its attention between the sequence and the slots of the depth.

    A share is the weight that `joint_attention` multiplies a value with, including the gate. Shares are computed beside the
    forward pass, whose output does not change. They are summed over all tokens but padding, so the size of the records does not
    grow with the text. Compiled models run uncompiled while the context is open.

    Args:
        model: A model as in `readers_of_depth`. It has additional hooks while the context is open.
        memory: Name of the memory that reads the depth. Default: memories of all names.
        layers: Indices of the layers to record. Default: all layers that read the depth.
        heads: Indices of the heads to record. Default: all heads.

    Raises:
        ValueError: For the reasons of `readers_of_depth`; if a head does not exist.
    """
    readers = readers_of_depth(model, memory, layers)
    for reader in readers:
        for head in heads or ():
            _check_head(reader, head)
    sums = {reader.place: DepthSums(reader, range(reader.num_heads) if heads is None else heads) for reader in readers}

    def add(reader: DepthReader, call: DepthCall) -> None:
        if reader.place in sums:
            sums[reader.place].add(call)

    with watch_depth(model, memory, add):
        yield DepthRecords(sums)


def _check_head(reader: DepthReader, head: int) -> None:
    """Check that a layer has a head."""
    if not 0 <= head < reader.num_heads:
        raise ValueError(
            f"head is {head}; expected one from 0 to {reader.num_heads - 1}, those of layer {reader.layer}."
        )


@dataclass(frozen=True)
class DepthReading:
    """Shares of attention in one layer, averaged over tokens.

    Args:
        layer: Index of the decoder layer.
        memory: Name of the memory.
        tokens: Number of tokens that were read.
        heads: Indices of the heads.
        gates: Gate c of each head; 1 for a memory without gates.
        slots: Slots that the layer reads.
        shares: For each head, the share of each slot: the weight that its value is multiplied with.
        sequence_shares: For each head, the share of the sequence.
    """

    layer: int
    memory: str
    tokens: int
    heads: tuple[int, ...]
    gates: list[float]
    slots: tuple[ReadSlot, ...]
    shares: list[list[float]]
    sequence_shares: list[float]

    @property
    def depth_shares(self) -> list[float]:
        """Share of the depth per head: the sum over slots."""
        return [sum(of_head) for of_head in self.shares]

    @property
    def mean_depth_share(self) -> float:
        """Share of the depth, averaged over heads."""
        return _mean(self.depth_shares)

    @property
    def mean_sequence_share(self) -> float:
        """Share of the sequence, averaged over heads."""
        return _mean(self.sequence_shares)

    @property
    def most_depth(self) -> tuple[int, float]:
        """Index of the head that reads most of the depth, and its share of the depth."""
        most = max(range(len(self.heads)), key=lambda index: self.depth_shares[index])
        return self.heads[most], self.depth_shares[most]

    @property
    def mean_shares(self) -> list[float]:
        """Share of each slot, averaged over heads."""
        return [_mean([of_head[index] for of_head in self.shares]) for index in range(len(self.slots))]

    def share_of(self, slot: ReadSlot) -> float | None:
        """Return the share of a slot, averaged over heads; None if the layer does not read the slot."""
        return self.mean_shares[self.slots.index(slot)] if slot in self.slots else None

    def share_of_source(self, source: str) -> float:
        """Return the share of all slots of one source together, averaged over heads."""
        return sum(share for slot, share in zip(self.slots, self.mean_shares, strict=True) if slot.source == source)


@dataclass(frozen=True)
class WriterReading:
    """Shares that layers give to one slot.

    Args:
        slot: Slot that the layers read.
        readers: Number of layers that may read the slot.
        mean_share: Share of the slot, averaged over these layers and their heads.
        most_layer: Index of the layer that reads most of the slot.
        most_share: Share of the slot in that layer, averaged over heads.
    """

    slot: ReadSlot
    readers: int
    mean_share: float
    most_layer: int
    most_share: float


def depth_readings(records: DepthRecords) -> list[DepthReading]:
    """Return the shares of each recorded layer.

    Args:
        records: Records that `record_depth` has taken.

    Raises:
        ValueError: If a recorded layer has read no token.
    """
    readings = []
    for memory_place, sums in records.sums.items():
        tokens = int(sums.tokens.item())
        if not tokens:
            raise ValueError(
                f"layer {memory_place} has read no token; expected a forward pass. Run the model in the context of record_depth."
            )
        readings.append(
            DepthReading(
                *(memory_place.layer, memory_place.name, tokens, sums.heads, sums.gates.tolist(), sums.reader.slots),
                shares=(sums.shares / sums.tokens).tolist(),
                sequence_shares=(sums.of_sequence / sums.tokens).tolist(),
            )
        )
    return readings


def writers(readings: Sequence[DepthReading]) -> list[WriterReading]:
    """Return the shares that layers give to each slot, the most read slots first.

    Args:
        readings: Readings of one memory.
    """
    slot_readings = []
    for slot in dict.fromkeys(slot for reading in readings for slot in reading.slots):
        shares = {reading.layer: reading.share_of(slot) for reading in readings}
        read = {layer: share for layer, share in shares.items() if share is not None}
        most = max(read, key=lambda layer: read[layer])
        slot_readings.append(WriterReading(slot, len(read), _mean(list(read.values())), most, read[most]))
    return sorted(slot_readings, key=lambda writer: -writer.mean_share)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class DepthMap:
    """Attention shares of one head: the weights that values are multiplied with, float64, on the CPU.

    Args:
        layer: Index of the decoder layer.
        head: Index of the head.
        sequence: Share of each key of the sequence, `[T, T]`, a row per token.
        depth: Share of each slot, `[T, m]`, a row per token.
        slots: Slots that the columns of `depth` stand for.
    """

    layer: int
    head: int
    sequence: torch.Tensor
    depth: torch.Tensor
    slots: tuple[ReadSlot, ...]


def depth_map(model: Any, tokens: torch.Tensor, layer: int, head: int, memory: str | None = None) -> DepthMap:
    """Let a model read a text, and return the shares that one head gives to keys and slots.

    Args:
        model: A model as in `readers_of_depth`. It is in eval mode while it reads.
        tokens: Token ids of the text, `[T]`.
        layer: Index of the decoder layer.
        head: Index of the head.
        memory: Name of the memory that reads the depth. Default: memories of all names.

    Raises:
        ValueError: For the reasons of `readers_of_depth`; if the head does not exist; if the model's attention does not say what
            its masks are.
    """
    (of_layer,) = readers_of_depth(model, memory, [layer])
    _check_head(of_layer, head)
    maps: list[DepthMap] = []

    def keep(reader: DepthReader, call: DepthCall) -> None:
        if reader.place == of_layer.place:
            of_slots, of_sequence = (part[0, head].double() for part in call.shares())  # [T, m] and [T]
            sequence = call.kwargs["sequence"].shares(head)[0].double() * of_sequence[:, None]
            maps.append(DepthMap(layer, head, sequence.cpu(), of_slots.cpu(), reader.slots))

    with evaluating(model), watch_depth(model, memory, keep):
        model(input_ids=tokens[None].to(model.device), use_cache=False)
    return maps[0]
