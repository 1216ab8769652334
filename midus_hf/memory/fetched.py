"""What the texts of a batch fetched from a bank: blocks of each level of a tree, and which row has which."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from midus_config.fetched_blocks import BankLayout


@dataclass(frozen=True)
class FetchedLevel:
    """What a layer got from one level.

    Args:
        tensors: By name, `[U, ...]`, the blocks that there are.
        blocks: `[B]`, int64, the block of each row, from 0 to U - 1.
    """

    tensors: Mapping[str, torch.Tensor]
    blocks: torch.Tensor


@dataclass(frozen=True)
class FetchedLayer:
    """What a layer got.

    Args:
        levels: Those that have blocks, from the root down.
    """

    levels: tuple[FetchedLevel, ...]


class FetchedBatch:
    """What the rows of a batch fetched, for all layers.

    Args:
        layout: Of the bank.
        records: For each level that has blocks, counted from 1, the records of the blocks that were fetched, `[U, numel]`.
        blocks: For each of these levels, which of its records each row has, `[B]`, int64.
    """

    def __init__(self, layout: BankLayout, records: Mapping[int, torch.Tensor], blocks: Mapping[int, torch.Tensor]):
        self.layout, self.records, self.blocks = layout, dict(records), dict(blocks)
        # Split once, so that the gradients of all tensors are put together once.
        parts = {
            level: self.records[level].split([place.numel for place in places], dim=1)
            for level, places in layout.records.items()
        }
        self._layers = {layer: FetchedLayer(tuple(self._levels_of(layer, parts))) for layer in layout.layers}

    def _levels_of(self, layer: int, parts: Mapping[int, tuple[torch.Tensor, ...]]) -> list[FetchedLevel]:
        levels = []
        for level, places in self.layout.records.items():
            tensors = {
                place.name: part.view(len(part), *place.tensor.shape)
                for place, part in zip(places, parts[level], strict=True)
                if place.layer == layer
            }
            levels.append(FetchedLevel(tensors, self.blocks[level]))
        return levels

    @property
    def num_rows(self) -> int:
        """B, the rows that fetched."""
        return len(next(iter(self.blocks.values())))

    def of(self, layer: int) -> FetchedLayer:
        """What a layer of the model got."""
        return self._layers[layer]

    def to(self, device: Any, non_blocking: bool = False) -> "FetchedBatch":
        """The same on another device; itself where it is there already."""
        records = {level: record.to(device, non_blocking=non_blocking) for level, record in self.records.items()}
        if all(record is self.records[level] for level, record in records.items()):
            return self
        blocks = {level: block.to(device, non_blocking=non_blocking) for level, block in self.blocks.items()}
        return FetchedBatch(self.layout, records, blocks)
