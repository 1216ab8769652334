"""Attention to the depth: how heads divide attention between the sequence and slots of earlier layers."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from midus_hf.config.errors import RequestError
from midus_hf.evaluation.text_rows import evaluating
from midus_hf.look.page import Panel, TextTable, grid, table_of
from midus_hf.memories.hosting.parts import decoder_of, token_places
from midus_hf.models.view import HostedMemory, depth_heads, hosted_memories, lacking, temporary_hooks
from midus_hf.ops.dispatch.private_torch import is_in_backward
from midus_hf.ops.moda.op import joint_shares

HOW_TO_READ = (
    "A head reads keys of the sequence and slots of the depth. The share of a key or slot is the weight that the head multiplies its "
    "value with, the gate included, averaged over tokens. Shares show what is read, and not what is added: a slot whose value is "
    "short, or that the output projection leaves out, adds little. In pictures, 2a is what attention of layer 2 wrote, and 2f what "
    "was projected from the input of its feed-forward network."
)
_MOST_SLOTS = 3  # number of slots per layer that the table names


class ReadSlot(NamedTuple):
    """A slot that a layer reads: the layer that wrote it, and its `source` there, `attention` or `ffn`."""

    layer: int
    source: str

    def __str__(self) -> str:
        return f"{self.layer} {self.source}"


class DepthReading:
    """Shares of attention in one layer, added up over tokens.

    Args:
        layer: Index of the decoder layer.
        slots: Slots that the layer reads, from the oldest to the newest.
        num_heads: H, the number of query heads.
    """

    def __init__(self, layer: int, slots: tuple[ReadSlot, ...], num_heads: int):
        self.layer = layer
        self.slots = slots
        # Gate c of each head in the latest pass, `[H]`; 1 for a memory without gates.
        self.gates = torch.ones(num_heads, dtype=torch.float64)
        # Number of tokens that were read, and the sums over them: of each slot, `[H, m]`, and of the sequence, `[H]`, float64.
        self._tokens = torch.zeros((), dtype=torch.float64)
        self._slot_sums = torch.zeros(num_heads, len(slots), dtype=torch.float64)
        self._sequence_sums = torch.zeros(num_heads, dtype=torch.float64)

    def add(
        self, slots: torch.Tensor, sequence: torch.Tensor, gates: torch.Tensor | None, real: torch.Tensor | None
    ) -> None:
        """Add the tokens of a pass.

        Args:
            slots: Share of each slot, `[B, H, T, m]`.
            sequence: Share of the sequence, `[B, H, T]`.
            gates: Gate of each head, `[H]`; None for a memory without gates.
            real: `[B, T]`, false for padding; None if no token is padding.
        """
        padding = torch.zeros(slots.shape[0], 1, slots.shape[2], dtype=torch.bool)
        padding = (padding if real is None else ~real[:, None]).to(slots.device)  # [B, 1, T]
        device = slots.device
        self._tokens = self._tokens.to(device) + (~padding).sum()
        self._slot_sums = self._slot_sums.to(device) + slots.double().masked_fill(padding[..., None], 0).sum((0, 2))
        self._sequence_sums = self._sequence_sums.to(device) + sequence.double().masked_fill(padding, 0).sum((0, 2))
        if gates is not None:
            self.gates = gates.double()

    @property
    def tokens(self) -> int:
        """Number of tokens that were read."""
        return int(self._tokens)

    @property
    def shares(self) -> torch.Tensor:
        """Share of each slot by head, the mean weight of its value over tokens, `[H, m]`, float64."""
        return (self._slot_sums / self._tokens).cpu()

    @property
    def sequence_shares(self) -> torch.Tensor:
        """Share of the sequence by head, the mean over tokens, `[H]`, float64."""
        return (self._sequence_sums / self._tokens).cpu()


def _readers(model: nn.Module) -> list[tuple[HostedMemory, tuple[ReadSlot, ...]]]:
    readers = []
    for hosted in hosted_memories(model, "attend"):
        depth = depth_heads(hosted.block)
        if depth is not None and depth.slots and depth.memory == hosted.name:
            slots = tuple(ReadSlot(key.layer, key.part.removesuffix("_key")) for key, _ in depth.slots)
            readers.append((hosted, slots))
    if not readers:
        raise lacking(model, "reads the depth")
    return readers


# A function that is called with an attention to the depth: the shares of slots `[B, H, T, m]` and of the sequence `[B, H, T]`, the
# memory's module, the arguments of its call by name, and `[B, T]`, false for padding, or None.
_Watcher = Callable[[torch.Tensor, torch.Tensor, Any, Mapping[str, Any], torch.Tensor | None], None]


@contextlib.contextmanager
def _watch_depth(model: nn.Module, watchers: Sequence[tuple[HostedMemory, _Watcher]]) -> Iterator[None]:
    """Call functions after each attention of their memory to the depth, without gradients."""
    real: list[torch.Tensor | None] = [None]

    def before(decoder: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        real[0] = _real_tokens(arguments, kwargs)

    @torch.no_grad()
    def after(watcher: _Watcher, memory: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if "sequence" not in kwargs or not arguments[0].numel() or is_in_backward():
            return
        sequence = kwargs["sequence"]
        gate = memory.gate
        shares = joint_shares(
            *(arguments[0], kwargs["keys"], sequence.log_sum(), sequence.scaling, sequence.softcap),
            *(None if gate is None else gate[:, None], memory.is_added),
        )
        watcher(*shares, memory, kwargs, real[0])

    with temporary_hooks() as hold:
        hold(decoder_of(model).register_forward_pre_hook(before, with_kwargs=True))
        for hosted, watcher in watchers:
            hold(hosted.module.register_forward_hook(partial(after, watcher), with_kwargs=True))
        yield


def _real_tokens(arguments: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return which tokens of a pass are not padding, `[B, T]`; None if no token is padding."""
    named = {**dict(zip(("input_ids", "attention_mask"), arguments, strict=False)), **kwargs}
    tokens = named.get("input_ids")
    tokens = named["inputs_embeds"] if tokens is None else tokens
    mask = named.get("token_mask")
    mask = named.get("attention_mask") if mask is None else mask
    return token_places(mask, None, tokens.shape[1], may_hold_documents=False).real


@contextlib.contextmanager
def record_depth(model: nn.Module) -> Iterator[list[DepthReading]]:
    """Record, in the context, how each head divides its attention between sequence and depth.

    A share is the weight that `joint_attention` multiplies a value with, including the gate. The output of the forward pass does not
    change. Shares are summed over all tokens except padding, so records do not grow with the text. Compiled models run uncompiled.

    Args:
        model: A causal language model whose decoder has `layers`. It has additional hooks within the context.

    Yields:
        A reading per layer that reads the depth, in the order of layers.

    Raises:
        RequestError: If no memory reads the depth, or if a memory is offloaded.
    """
    readings, watchers = [], []
    for hosted, slots in _readers(model):
        reading = DepthReading(hosted.layer, slots, decoder_of(model).config.num_attention_heads)
        readings.append(reading)

        def add(
            shares: Any, sequence: Any, memory: Any, kwargs: Any, real: Any, reading: DepthReading = reading
        ) -> None:
            reading.add(shares, sequence, memory.gate, real)

        watchers.append((hosted, add))
    with _watch_depth(model, watchers):
        yield readings


@dataclass(frozen=True)
class DepthMap:
    """Attention shares of a head: of each key, `[T, T]`, and each slot, `[T, m]`, float64, on the CPU."""

    layer: int
    head: int
    sequence: torch.Tensor
    depth: torch.Tensor
    slots: tuple[ReadSlot, ...]


def depth_map(model: Any, tokens: torch.Tensor, layer: int, head: int) -> DepthMap:
    """Run a model on a text, and return the shares that one head gives to keys and slots (MoDA, figure 5)."""
    readers = {hosted.layer: (hosted, slots) for hosted, slots in _readers(model)}
    if layer not in readers:
        raise RequestError(f"layer is {layer}; expected one that reads the depth: {', '.join(map(str, readers))}.")
    num_heads = decoder_of(model).config.num_attention_heads
    if not 0 <= head < num_heads:
        raise RequestError(f"head is {head}; expected one from 0 to {num_heads - 1}, those of layer {layer}.")
    hosted, slots = readers[layer]
    maps: list[DepthMap] = []

    def keep(shares: Any, sequence: Any, memory: Any, kwargs: Any, real: Any) -> None:
        keys = kwargs["sequence"].shares(head)[0].double() * sequence[0, head].double()[:, None]
        maps.append(DepthMap(layer, head, keys.cpu(), shares[0, head].double().cpu(), slots))

    with evaluating(model), _watch_depth(model, [(hosted, keep)]):
        model(input_ids=tokens[None].to(model.device), use_cache=False)
    return maps[0]


def depth_rows(readings: Sequence[DepthReading]) -> list[dict[str, Any]]:
    """Return a row per layer: its gates and shares by head, and by head and slot."""
    return [
        {
            "layer": reading.layer,
            "tokens": reading.tokens,
            "gates": reading.gates.tolist(),
            "depth_shares": reading.shares.sum(1).tolist(),
            "sequence_shares": reading.sequence_shares.tolist(),
            "slots": [slot._asdict() for slot in reading.slots],
            "shares": reading.shares.tolist(),
        }
        for reading in readings
    ]


def depth_finding(readings: Sequence[DepthReading]) -> str:
    """Return in one sentence which layer reads the depth most."""
    shares = {reading.layer: reading.shares.sum(1).mean().item() for reading in readings}
    layer = max(shares, key=lambda layer: shares[layer])
    return f"Layer {layer} reads most of earlier layers: {shares[layer]:.1%}, the mean over its heads."


def depth_table(readings: Sequence[DepthReading]) -> TextTable:
    """Return a table of the shares of depth and sequence by layer, and of the most read slots."""
    rows = []
    for reading in readings:
        shares = reading.shares.mean(0)
        best = [(shares[index].item(), reading.slots[index]) for index in shares.argsort(descending=True, stable=True)]
        rows.append(
            {
                "layer": reading.layer,
                "depth": shares.sum().item(),
                "largest": reading.shares.sum(1).max().item(),
                "head": int(reading.shares.sum(1).argmax()),
                "sequence": reading.sequence_shares.mean().item(),
                "least": reading.gates.min().item(),
                "greatest": reading.gates.max().item(),
                "most": ", ".join(f"{slot} {share:.1%}" for share, slot in best[:_MOST_SLOTS] if share) or "nothing",
            }
        )
    columns = {"layer": "{layer}", "depth": "{depth:.1%}", "largest (head)": "{largest:.1%} ({head})"}
    columns |= {"sequence": "{sequence:.1%}", "gate": "{least:.3g} to {greatest:.3g}", "reads most": "{most}"}
    return table_of("Shares of the depth and of the sequence, the mean over tokens and heads", rows, columns)


def depth_panels(readings: Sequence[DepthReading], head: DepthMap | None = None) -> dict[str, Panel]:
    """Return a map of what layers read of earlier layers, averaged over heads, or the map of one head."""
    if head is not None:
        numbers = [str(token) for token in range(len(head.sequence))]
        names = [*numbers, *(f"{slot.layer}{slot.source[0]}" for slot in head.slots)]
        # Roots, so that small shares of many keys can be seen.
        rows = torch.cat([head.sequence, head.depth], 1).sqrt().tolist()
        title = f"Layer {head.layer}, head {head.head}: roots of the shares"
        return {title: grid(rows, "keys | slots", "query", columns=names, lines=numbers, boundary=len(numbers))}
    slots = sorted({slot for reading in readings for slot in reading.slots})
    rows = []
    for reading in readings:
        shares = dict(zip(reading.slots, reading.shares.mean(0).tolist(), strict=True))
        rows.append([shares.get(slot, float("nan")) for slot in slots])
    names = [f"{slot.layer}{slot.source[0]}" for slot in slots]
    layers = [str(reading.layer) for reading in readings]
    return {"Share of attention": grid(rows, "written by layer", "read by layer", columns=names, lines=layers)}
