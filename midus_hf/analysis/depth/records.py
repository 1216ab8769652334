"""Records of how attention is shared between the sequence and the slots of the depth, taken while a model reads texts."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from midus_hf.analysis.depth.readers import DepthCall, DepthReader, readers_of_depth, watch_depth
from midus_hf.analysis.watched_models import MemoryPlace


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
            check_head(reader, head)
    sums = {reader.place: DepthSums(reader, range(reader.num_heads) if heads is None else heads) for reader in readers}

    def add(reader: DepthReader, call: DepthCall) -> None:
        if reader.place in sums:
            sums[reader.place].add(call)

    with watch_depth(model, memory, add):
        yield DepthRecords(sums)


def check_head(reader: DepthReader, head: int) -> None:
    """Check that a layer has a head."""
    if not 0 <= head < reader.num_heads:
        raise ValueError(
            f"head is {head}; expected one from 0 to {reader.num_heads - 1}, those of layer {reader.layer}."
        )
