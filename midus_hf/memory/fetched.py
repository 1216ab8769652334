"""What the texts of a batch fetched from a bank: blocks of each level of a tree, and which row has which."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from midus_hf.config.fetched_blocks import BankLayout

_MOST_JOINED_BYTES = 2**30


@dataclass(frozen=True)
class FetchedLevel:
    """What a layer got from one level.

    Args:
        tensors: By name, `[U, ...]`, the blocks that there are.
        blocks: `[B]`, int64, the block of each row, from 0 to U - 1; None where row b has block b.
    """

    tensors: Mapping[str, torch.Tensor]
    blocks: torch.Tensor | None


@dataclass(frozen=True)
class FetchedLayer:
    """What a layer got.

    Args:
        levels: Those that have blocks, from the root down; one where they were joined.
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
        self._joined: FetchedBatch | None = None
        self._joins = bool(layout.blocks.joined_along)
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

    def joined(self, most_bytes: int = _MOST_JOINED_BYTES) -> "FetchedBatch":
        """The same for many passes: the blocks of each path made one, of all levels, so that a layer computes with one.

        It takes a copy, once, of what each path fetched. The sums of levels are taken in another order.

        Args:
            most_bytes: That the copy may have. Default: 1 GB.

        Returns:
            Itself where there is nothing to join, no room, or a gradient is wanted.
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
        """For each row, the number of its block within each level."""
        return list(zip(*(blocks.tolist() for blocks in self.blocks.values()), strict=True))

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


def _joined_level(
    layer: FetchedLayer, layout: BankLayout, of_levels: list[torch.Tensor], blocks: torch.Tensor | None
) -> FetchedLevel:
    """The levels of a layer as one.

    Args:
        layer: That they are of.
        layout: Of the bank.
        of_levels: For each level, the block that each of P paths has, `[P]`.
        blocks: The path of each row.
    """
    tensors = {
        name: torch.cat(
            [level.tensors[name][chosen] for level, chosen in zip(layer.levels, of_levels, strict=True)], 1 + along
        )
        for name, along in layout.blocks.joined_along.items()
    }
    return FetchedLevel(tensors, blocks)
