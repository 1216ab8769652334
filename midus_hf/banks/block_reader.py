"""The interface through which texts fetch blocks from a bank."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from midus_hf.banks.bank_paths import first_stray
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.memory.fetched import FetchedBatch

# The number that stands for the generic memory at every level of a path.
GENERIC = -1


class BlockReader(ABC):
    """Interface for reading blocks of a tree: each row of a batch fetches one block per level."""

    # Whether a fetch with gradients enabled belongs to an autograd graph, and therefore serves one pass only.
    trains: bool = False

    def __init__(self, layout: BankLayout):
        self.layout = layout
        self._latest: tuple[Any, FetchedBatch] | None = None

    @abstractmethod
    def block(self, level: int, index: int) -> torch.Tensor:
        """Return the record of a block, `[numel]`, on the CPU. Callers must not change the record.

        Args:
            level: Level of the block, counted from 1.
            index: Node within the level; -1 for the generic memory.
        """

    def version(self) -> Any:
        """Return a value that differs once somebody else has written to the bank's files; None if nobody else can."""
        return None

    def changed(self) -> None:
        """Forget the latest fetch because a block has changed."""
        self._latest = None

    def fetch(
        self, memory_ids: torch.Tensor, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> FetchedBatch:
        """Fetch the blocks on the paths of a batch.

        Args:
            memory_ids: Paths, `[B, p]`, integers: per row one node for each level of the tree, from 0 to `k ** l - 1`
                at level `l`. A row of -1 fetches the generic memory.
            device: Device of the fetched blocks. Default: the CPU.
            dtype: Dtype that the blocks are cast to. Default: the dtype of the bank.

        Raises:
            ValueError: If the shape is wrong, a number is out of range, or a node is not a child of the node before it.
        """
        paths = self._checked(memory_ids)
        request = (tuple(map(tuple, paths)), torch.device(device), dtype, self.version())
        wants_gradients = torch.is_grad_enabled()
        serves_again = not (self.trains and wants_gradients)
        if serves_again and self._latest is not None and self._latest[0] == request:
            return self._latest[1]  # generation fetches the same blocks at every token
        # A later pass with gradients may reuse this fetch, so its tensors must not be inference tensors. Leaving inference
        # mode turns gradients on; the second context restores the caller's setting.
        with torch.inference_mode(False), torch.set_grad_enabled(wants_gradients):
            fetched = self._fetched(paths, device, dtype)
        if serves_again:
            self._latest = (request, fetched)
        return fetched

    def _fetched(self, paths: list[list[int]], device: torch.device | str, dtype: torch.dtype | None) -> FetchedBatch:
        records, blocks = {}, {}
        for level in self.layout.levels:
            nodes = [path[level - 1] for path in paths]
            distinct = list(dict.fromkeys(nodes))
            rows = [self.block(level, node) for node in distinct]
            # A copy, since rows of the mapped file change when somebody writes to it.
            records[level] = torch.stack(rows).to(device, dtype)
            positions = {node: position for position, node in enumerate(distinct)}
            blocks[level] = torch.tensor([positions[node] for node in nodes], device=device)
        return FetchedBatch(self.layout, records, blocks)

    def generic_ids(self, batch: int) -> torch.Tensor:
        """Return paths of the generic memory for every row, `[batch, p]`."""
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
