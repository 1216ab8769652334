"""Blocks that the texts of a batch fetched from a bank, for each level of a tree, and which row has which block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from midus_hf.config.fetched_blocks import BankLayout

_MOST_JOINED_BYTES = 2**30


@dataclass(frozen=True)
class FetchedLevel:
    """Blocks of one level, for one layer.

    Args:
        tensors: Each tensor of the blocks by name, `[U, ...]`, for U blocks.
        blocks: `[B]`, int64, the block of each row, from 0 to U - 1; None if row b has block b.
    """

    tensors: Mapping[str, torch.Tensor]
    blocks: torch.Tensor | None


@dataclass(frozen=True)
class FetchedLayer:
    """Blocks for one layer.

    Args:
        levels: The levels that have blocks, from the root down; a single level if the blocks were joined.
    """

    levels: tuple[FetchedLevel, ...]


class FetchedBatch:
    """Blocks that the rows of a batch fetched, for all layers.

    Args:
        layout: Layout of the bank.
        records: For each level with blocks, counted from 1, the records of the fetched blocks, `[U, numel]`.
        blocks: For each of these levels, the record of each row, `[B]`, int64, from 0 to U - 1.
    """

    def __init__(self, layout: BankLayout, records: Mapping[int, torch.Tensor], blocks: Mapping[int, torch.Tensor]):
        self.layout, self.records, self.blocks = layout, dict(records), dict(blocks)
        self._joined: FetchedBatch | None = None
        self._joins = bool(layout.blocks.joined_along)
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

    def joined(self, most_bytes: int = _MOST_JOINED_BYTES) -> "FetchedBatch":
        """Return the batch for use in many passes: for each path, the blocks of all levels joined into one block per layer.

        The first call copies the blocks of every path. Sums over levels are then taken in another order.

        Args:
            most_bytes: Largest size of the copy. Default: 1 GB.

        Returns:
            The joined batch; this batch itself if its blocks cannot be joined, the copy is too large, or records need gradients.
        """
        if self._joined is None and self._joins:
            paths = list(dict.fromkeys(self._paths()))
            size = sum(len(paths) * record[0].nbytes for record in self.records.values())
            self._joins = size <= most_bytes and not any(record.requires_grad for record in self.records.values())
            self._joined = self._joined_by(paths) if self._joins else None
        return self._joined or self

    def _joined_by(self, paths: list[tuple[int, ...]]) -> "FetchedBatch":
        of_row = [paths.index(path) for path in self._paths()]
        device = next(iter(self.blocks.values())).device
        blocks = None if of_row == list(range(len(paths))) else torch.tensor(of_row, device=device)
        of_levels = [torch.tensor(numbers, device=device) for numbers in zip(*paths, strict=True)]
        joined = FetchedBatch(self.layout, self.records, self.blocks)
        joined._layers = {
            layer: FetchedLayer((_joined_level(self._layers[layer], self.layout, of_levels, blocks),))
            for layer in self.layout.layers
        }
        joined._joins = False
        return joined

    def _paths(self) -> list[tuple[int, ...]]:
        """Return for each row the number of the row's block in each level."""
        return list(zip(*(blocks.tolist() for blocks in self.blocks.values()), strict=True))

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch, B."""
        return len(next(iter(self.blocks.values())))

    def of(self, layer: int) -> FetchedLayer:
        """Return the blocks for a layer of the model, by the layer's index."""
        return self._layers[layer]

    def to(self, device: Any, non_blocking: bool = False) -> "FetchedBatch":
        """Return the batch on another device, or this batch itself if it is there already."""
        records = {level: record.to(device, non_blocking=non_blocking) for level, record in self.records.items()}
        if all(record is self.records[level] for level, record in records.items()):
            return self
        blocks = {level: block.to(device, non_blocking=non_blocking) for level, block in self.blocks.items()}
        return FetchedBatch(self.layout, records, blocks)


def _joined_level(
    layer: FetchedLayer, layout: BankLayout, of_levels: list[torch.Tensor], blocks: torch.Tensor | None
) -> FetchedLevel:
    """Return a layer's levels joined into one, for P paths with a block of each level, `[P]`, and rows with a path each, `[B]`."""
    tensors = {
        name: torch.cat(
            [level.tensors[name][chosen] for level, chosen in zip(layer.levels, of_levels, strict=True)], 1 + along
        )
        for name, along in layout.blocks.joined_along.items()
    }
    return FetchedLevel(tensors, blocks)
