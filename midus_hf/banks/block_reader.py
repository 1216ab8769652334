"""What texts fetch blocks from, wherever these are."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from midus_config.fetched_blocks import BankLayout
from midus_hf.memory.fetched import FetchedBatch

GENERIC = -1
"""As each number of a path: the blocks of the generic memory."""


class BlockReader(ABC):
    """Blocks of a tree, of which each row of a batch fetches one per level.

    Args:
        layout: Of the bank.
    """

    trains: bool = False
    """Whether what is fetched where gradients are wanted belongs to a graph, and serves one pass alone."""

    def __init__(self, layout: BankLayout):
        self.layout = layout
        self._latest: tuple[Any, FetchedBatch] | None = None

    @abstractmethod
    def block(self, level: int, index: int) -> torch.Tensor:
        """The record of a block, `[numel]`, on the CPU; not to be changed.

        Args:
            level: Counted from 1.
            index: Of the node within the level, or, behind the last, the generic memory's.
        """

    def changed(self) -> None:
        """Forget what was fetched: a block has changed."""
        self._latest = None

    def fetch(
        self, memory_ids: torch.Tensor, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> FetchedBatch:
        """Fetch the blocks of the paths of a batch.

        Args:
            memory_ids: `[B, p]`, integers: for each row its node of each level of the tree, from 0 to `k ** l - 1`; a row of -1
                fetches the generic memory.
            device: To put them on. Default: the CPU.
            dtype: To cast them to. Default: that of the bank.

        Raises:
            ValueError: If the shape is another, or a number out of range.
        """
        paths = self._checked(memory_ids)
        key = (tuple(map(tuple, paths)), torch.device(device), dtype)
        wants_gradients = torch.is_grad_enabled()
        serves_again = not (self.trains and wants_gradients)
        if serves_again and self._latest is not None and self._latest[0] == key:
            return self._latest[1]  # generation asks for the same at every token
        # What is kept may be read by a pass with gradients later; to leave inference mode is to turn gradients on.
        with torch.inference_mode(False), torch.set_grad_enabled(wants_gradients):
            fetched = self._fetched(paths, device, dtype)
        if serves_again:
            self._latest = (key, fetched)
        return fetched

    def _fetched(self, paths: list[list[int]], device: torch.device | str, dtype: torch.dtype | None) -> FetchedBatch:
        records, blocks = {}, {}
        for level in self.layout.levels:
            generic = self.layout.blocks.nodes(level)
            of_row = [generic if path[level - 1] == GENERIC else path[level - 1] for path in paths]
            there_are = list(dict.fromkeys(of_row))
            stacked = [self.block(level, index) for index in there_are]
            records[level] = _stacked(stacked).to(device, dtype)
            positions = {index: position for position, index in enumerate(there_are)}
            blocks[level] = torch.tensor([positions[index] for index in of_row], device=device)
        return FetchedBatch(self.layout, records, blocks)

    def generic_ids(self, batch: int) -> torch.Tensor:
        """Paths of the generic memory for all rows, `[batch, p]`."""
        return torch.full((batch, self.layout.num_levels), GENERIC)

    def _checked(self, memory_ids: torch.Tensor) -> list[list[int]]:
        levels = self.layout.num_levels
        if memory_ids.dim() != 2 or memory_ids.shape[1] != levels or memory_ids.dtype.is_floating_point:
            raise ValueError(
                f"memory_ids is {tuple(memory_ids.shape)}, {memory_ids.dtype}; expected integers [batch, {levels}], for each row a "
                "node of each level of the tree."
            )
        paths: list[list[int]] = memory_ids.tolist()
        for row, path in enumerate(paths):
            if all(number == GENERIC for number in path):
                continue
            for level, number in enumerate(path, 1):
                nodes = self.layout.blocks.nodes(level)
                if not 0 <= number < nodes:
                    raise ValueError(
                        f"memory_ids has {number} for level {level} in row {row}; expected 0 to {nodes - 1}, or a row of -1 for the "
                        "generic memory."
                    )
        return paths


def _stacked(records: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[U, numel]`; no copy where there is one."""
    return records[0].unsqueeze(0) if len(records) == 1 else torch.stack(list(records))
