"""What texts fetch blocks from, wherever these are."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from midus_hf.banks.bank_paths import first_stray
from midus_hf.banks.tiers import BlockKey, TierStatistics
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.config.installed import not_carried
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

    @not_carried
    @abstractmethod
    def statistics(self) -> dict[str, TierStatistics]:
        """What fetches found in each tier since the bank was opened."""

    @not_carried
    @abstractmethod
    def read_ahead(self, keys: Sequence[BlockKey]) -> None:
        """Let threads read blocks that are to be fetched soon; returns at once."""

    def changed(self) -> None:
        """Forget what was fetched: a block has changed."""
        self._latest = None

    @not_carried
    def prefetch(self, memory_ids: torch.Tensor) -> None:
        """Let threads read the blocks of paths that are to be fetched soon; returns at once.

        The fetch waits for what is under way. What goes wrong is raised there.

        Args:
            memory_ids: As for `fetch`.

        Raises:
            ValueError: As `fetch`.
        """
        self.read_ahead(self._keys(self._checked(memory_ids)))

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
            ValueError: If the shape is another, a number is out of range, or a node is no child of the one before it.
        """
        paths = self._checked(memory_ids)
        keys = self._keys(paths)
        asked = (tuple(map(tuple, paths)), torch.device(device), dtype, self._versions(keys))
        wants_gradients = torch.is_grad_enabled()
        serves_again = not (self.trains and wants_gradients)
        if serves_again and self._latest is not None and self._latest[0] == asked:
            return self._latest[1]  # generation asks for the same at every token
        # What is kept may be read by a pass with gradients later; to leave inference mode is to turn gradients on.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(wants_gradients),
            self._all_at_once(keys, device, dtype),
        ):
            fetched = self._fetched(paths, device, dtype)
        if serves_again:
            self._latest = (asked, fetched)
        return fetched

    def _fetched(self, paths: list[list[int]], device: torch.device | str, dtype: torch.dtype | None) -> FetchedBatch:
        records, blocks = {}, {}
        for level in self.layout.levels:
            of_row = self._of_rows(paths, level)
            there_are = list(dict.fromkeys(of_row))
            records[level] = self._stacked(level, there_are, device, dtype)
            positions = {index: position for position, index in enumerate(there_are)}
            blocks[level] = torch.tensor([positions[index] for index in of_row], device=device)
        return FetchedBatch(self.layout, records, blocks)

    def _stacked(
        self, level: int, indices: Sequence[int], device: torch.device | str, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """The records of blocks of a level, `[U, numel]`, on a device."""
        return stacked([self.block(level, index) for index in indices]).to(device, dtype)

    def _all_at_once(
        self, keys: Sequence[BlockKey], device: torch.device | str, dtype: torch.dtype | None
    ) -> contextlib.AbstractContextManager[None]:
        """While the context lasts, blocks are read that will be asked for in it."""
        return contextlib.nullcontext()

    def _versions(self, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        """What tells that a block is another than it was when it was fetched, where others may change it."""
        return ()

    def _of_rows(self, paths: list[list[int]], level: int) -> list[int]:
        """The index of the block of a level that each row has."""
        generic = self.layout.blocks.nodes(level)
        return [generic if path[level - 1] == GENERIC else path[level - 1] for path in paths]

    def _keys(self, paths: list[list[int]]) -> list[BlockKey]:
        """Every block of some paths, once."""
        return [(level, index) for level in self.layout.levels for index in dict.fromkeys(self._of_rows(paths, level))]

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
            stray = first_stray(path, self.layout.blocks.branching)
            if stray is not None:
                level, number, parent = stray
                first = self.layout.blocks.branching * parent
                raise ValueError(
                    f"memory_ids has {number} for level {level} in row {row}, which is no child of node {parent}; expected {first} "
                    f"to {first + self.layout.blocks.branching - 1}. Take a path that the tree has."
                )
        return paths


def stacked(records: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[U, numel]`; no copy where there is one."""
    return records[0].unsqueeze(0) if len(records) == 1 else torch.stack(list(records))
