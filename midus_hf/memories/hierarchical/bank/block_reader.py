"""The interface through which texts fetch blocks from a bank, and the check of their paths."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from midus_hf.config.errors import RequestError
from midus_hf.memories.hierarchical.bank.fetched import FetchedBatch
from midus_hf.memories.hierarchical.blocks import BankLayout

# The number of the generic memory at every level of a path.
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
        """Return the record of a block (level from 1, node, -1 for the generic memory), `[numel]`, on the CPU; do not modify it."""

    def changed(self) -> None:
        """Forget the latest fetch because a block has changed."""
        self._latest = None

    def fetch(
        self, memory_ids: torch.Tensor, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> FetchedBatch:
        """Fetch the blocks on paths, `[B, p]`, integers: a node for each level of the tree, or a row of -1 for the generic memory."""
        check_paths(memory_ids, self.layout, "memory_ids")
        paths = memory_ids.tolist()
        request = (paths, torch.device(device), dtype)
        wants_gradients = torch.is_grad_enabled()
        serves_again = not (self.trains and wants_gradients)
        latest = self._latest  # read once, since another thread may replace it
        if serves_again and latest is not None and latest[0] == request:
            return latest[1]  # generation fetches the same blocks at every token
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
            positions = {node: position for position, node in enumerate(dict.fromkeys(nodes))}
            records[level] = torch.stack([self.block(level, node) for node in positions]).to(device, dtype)
            blocks[level] = torch.tensor([positions[node] for node in nodes], device=device)
        return FetchedBatch(self.layout, records, blocks)

    def generic_ids(self, batch: int) -> torch.Tensor:
        """Return paths of the generic memory for every row, `[batch, p]`."""
        return torch.full((batch, self.layout.num_levels), GENERIC)


def check_paths(paths: torch.Tensor, layout: BankLayout, name: str) -> None:
    """Check that a bank has a block for every node on paths."""
    levels, k = layout.num_levels, layout.blocks.branching
    if paths.dim() != 2 or paths.shape[1] != levels or paths.dtype.is_floating_point:
        raise RequestError(
            f"{name} is {tuple(paths.shape)}, {paths.dtype}; expected integers [batch, {levels}], for each row a node of each "
            "level of the tree."
        )
    paths = paths.cpu()
    in_tree = (paths != GENERIC).any(1, keepdim=True)
    counts = torch.tensor([layout.blocks.nodes(level) for level in range(1, levels + 1)])
    for row, column in (in_tree & ((paths < 0) | (paths >= counts))).nonzero().tolist():
        raise RequestError(
            f"{name} has {int(paths[row, column])} for level {column + 1} in row {row}; expected 0 to {int(counts[column]) - 1}, "
            "or a row of -1 for the generic memory."
        )
    for row, column in (in_tree & (paths[:, 1:] // k != paths[:, :-1])).nonzero().tolist():
        parent, node = paths[row, column : column + 2].tolist()
        raise RequestError(
            f"{name} has {node} for level {column + 2} in row {row}, which is no child of node {parent}; expected {k * parent} to "
            f"{k * parent + k - 1}. Take paths of the tree that the model is for."
        )
