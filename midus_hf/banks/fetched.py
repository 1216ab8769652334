"""Blocks that the texts of a batch fetched from a bank, for each level of a tree, and which row has which block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from midus_hf.memories.hierarchical.blocks import BankLayout


@dataclass(frozen=True)
class FetchedLevel:
    """Blocks of one level, for one layer: each tensor by name, `[U, ...]`, and the block of each row, `[B]`, int64."""

    tensors: Mapping[str, torch.Tensor]
    blocks: torch.Tensor


@dataclass(frozen=True)
class FetchedLayer:
    """Blocks for one layer."""

    levels: tuple[FetchedLevel, ...]


class FetchedBatch:
    """Blocks that rows of a batch fetched: by level, from 1, records `[U, numel]`, and the record of each row, `[B]`, int64."""

    def __init__(self, layout: BankLayout, records: Mapping[int, torch.Tensor], blocks: Mapping[int, torch.Tensor]):
        self.layout, self.records, self.blocks = layout, dict(records), dict(blocks)
        # Split once, so that the gradients of all tensors are concatenated once.
        parts = {
            level: self.records[level].split([field.numel for field in fields], dim=1)
            for level, fields in layout.records.items()
        }
        self._layers = {layer: FetchedLayer(tuple(self._levels_of(layer, parts))) for layer in layout.layers}

    def _levels_of(self, layer: int, parts: Mapping[int, tuple[torch.Tensor, ...]]) -> list[FetchedLevel]:
        levels = []
        for level, fields in self.layout.records.items():
            tensors = {
                field.name: part.view(len(part), *field.tensor.shape)
                for field, part in zip(fields, parts[level], strict=True)
                if field.layer == layer
            }
            levels.append(FetchedLevel(tensors, self.blocks[level]))
        return levels

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch, B."""
        return len(next(iter(self.blocks.values())))

    def blocks_for(self, layer: int) -> FetchedLayer:
        """Return the blocks for a layer of the model, by the layer's index."""
        return self._layers[layer]

    def to(self, device: Any, non_blocking: bool = False) -> "FetchedBatch":
        """Return the batch on another device, or this batch itself if it is there already."""
        records = {level: record.to(device, non_blocking=non_blocking) for level, record in self.records.items()}
        if all(record is self.records[level] for level, record in records.items()):
            return self
        blocks = {level: block.to(device, non_blocking=non_blocking) for level, block in self.blocks.items()}
        return FetchedBatch(self.layout, records, blocks)
