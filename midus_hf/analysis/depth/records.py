"""How attention is shared between the sequence and the slots of the depth, recorded while a model reads texts."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from midus_hf.analysis.depth.readers import DepthCall, DepthReader, readers_of_depth, watch_depth
from midus_hf.analysis.watched_models import MemoryPlace


class DepthSums:
    """What the heads of one layer read of the depth: sums over tokens, float64.

    Args:
        reader: The layer.
        heads: Those that are recorded.
    """

    def __init__(self, reader: DepthReader, heads: Sequence[int]):
        self.reader, self.heads = reader, tuple(heads)
        self.tokens = torch.zeros((), dtype=torch.float64)
        self.shares = torch.zeros(len(self.heads), len(reader.slots), dtype=torch.float64)  # [heads, m]
        self.of_sequence = torch.zeros(len(self.heads), dtype=torch.float64)
        self.gates = torch.ones(len(self.heads), dtype=torch.float64)  # c, as it was last

    def add(self, call: DepthCall) -> None:
        """Add the tokens of a pass."""
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
    """What was recorded, by place.

    Args:
        sums: Of each layer that is recorded.
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
    """Record, while the context is open, how each head shares its attention out between the sequence and the slots of the depth.

    Shares are what `joint_attention` multiplies with, the gate included. They are computed beside the forward pass, which gives what
    it gave before, and added up over the tokens that are no padding: nothing of the size of the text is kept. Code that
    `torch.compile` has made runs uncompiled while the context is open.

    Args:
        model: As for `readers_of_depth`. It has hooks more while the context is open.
        memory: Name of one of several memories that read the depth. Default: all.
        layers: That are recorded. Default: all that read the depth.
        heads: That are recorded. Default: all.

    Raises:
        ValueError: As `readers_of_depth`, and if there is no such head.
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
    """See that a layer has a head.

    Raises:
        ValueError: If it has none of that number.
    """
    if not 0 <= head < reader.num_heads:
        raise ValueError(
            f"head is {head}; expected one from 0 to {reader.num_heads - 1}, those of layer {reader.layer}."
        )
