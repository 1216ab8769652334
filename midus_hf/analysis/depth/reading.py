"""Shares of recorded attention to the depth, per layer and head, and per layer that writes."""

from collections.abc import Sequence
from dataclasses import dataclass

from midus_hf.analysis.depth.readers import ReadSlot
from midus_hf.analysis.depth.records import DepthRecords


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
