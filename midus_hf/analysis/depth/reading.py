"""What was recorded of attention to the depth, as shares: by layer and head, and of each writer by each reader."""

from collections.abc import Sequence
from dataclasses import dataclass

from midus_hf.analysis.depth.readers import ReadSlot
from midus_hf.analysis.depth.records import DepthRecords


@dataclass(frozen=True)
class DepthReading:
    """How the heads of a layer share their attention out, the mean over tokens.

    Args:
        layer: Index of the decoder layer.
        memory: Name of the memory.
        tokens: That were read.
        heads: Numbers of the heads.
        gates: c of each head; 1 where there is none.
        slots: What is read of the depth.
        shares: Of each slot, for each head: what its value is multiplied with.
        sequence_shares: Of the sequence, for each head.
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
        """Share of the depth, for each head."""
        return [sum(of_head) for of_head in self.shares]

    @property
    def mean_depth_share(self) -> float:
        """Share of the depth, the mean over heads."""
        return _mean(self.depth_shares)

    @property
    def mean_sequence_share(self) -> float:
        """Share of the sequence, the mean over heads."""
        return _mean(self.sequence_shares)

    @property
    def most_depth(self) -> tuple[int, float]:
        """The head that reads most of the depth, and its share."""
        most = max(range(len(self.heads)), key=lambda place: self.depth_shares[place])
        return self.heads[most], self.depth_shares[most]

    @property
    def mean_shares(self) -> list[float]:
        """Share of each slot, the mean over heads."""
        return [_mean([of_head[place] for of_head in self.shares]) for place in range(len(self.slots))]

    def share_of(self, slot: ReadSlot) -> float | None:
        """Share of a slot, the mean over heads; None if the layer does not read it."""
        return self.mean_shares[self.slots.index(slot)] if slot in self.slots else None

    def share_of_source(self, source: str) -> float:
        """Share of all slots of one kind, the mean over heads."""
        return sum(share for slot, share in zip(self.slots, self.mean_shares, strict=True) if slot.source == source)


@dataclass(frozen=True)
class WriterReading:
    """What all layers together read of one slot.

    Args:
        slot: The slot.
        readers: How many layers may read it.
        mean_share: The mean over these layers, and their heads.
        most_layer: The one that reads most of it.
        most_share: Share that it reads.
    """

    slot: ReadSlot
    readers: int
    mean_share: float
    most_layer: int
    most_share: float


def depth_readings(records: DepthRecords) -> list[DepthReading]:
    """Shares of what was recorded, by layer.

    Args:
        records: From `record_depth`.

    Raises:
        ValueError: If nothing was read.
    """
    readings = []
    for place, sums in records.sums.items():
        tokens = int(sums.tokens.item())
        if not tokens:
            raise ValueError(
                f"layer {place} has read no token; expected a forward pass. Run the model in the context of record_depth."
            )
        readings.append(
            DepthReading(
                *(place.layer, place.name, tokens, sums.heads, sums.gates.tolist(), sums.reader.slots),
                shares=(sums.shares / sums.tokens).tolist(),
                sequence_shares=(sums.of_sequence / sums.tokens).tolist(),
            )
        )
    return readings


def writers(readings: Sequence[DepthReading]) -> list[WriterReading]:
    """What is read of each slot, most read ones first.

    Args:
        readings: Of one memory.
    """
    found = []
    for slot in dict.fromkeys(slot for reading in readings for slot in reading.slots):
        shares = {reading.layer: reading.share_of(slot) for reading in readings}
        read = {layer: share for layer, share in shares.items() if share is not None}
        most = max(read, key=lambda layer: read[layer])
        found.append(WriterReading(slot, len(read), _mean(list(read.values())), most, read[most]))
    return sorted(found, key=lambda writer: -writer.mean_share)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
