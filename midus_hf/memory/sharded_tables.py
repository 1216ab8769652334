"""Reading of tables whose columns several processes share."""

from typing import Any

import torch

from midus_hf.memory.tables import TableReading
from midus_hf.ops.gather.column_shards import sharded_gathered_products, sharded_parted_gather, sharded_weighted_gather


class ShardedReading(TableReading):
    """Sums of rows of a table, and products with rows, if each process holds some of the columns.

    Args:
        sparse_gradient: Whether gradients of tables are sparse tensors of the rows that were read.
        processes: The `ProcessGroup` whose processes share the columns.
    """

    def __init__(self, sparse_gradient: bool, processes: Any):
        super().__init__(sparse_gradient)
        self._processes = processes

    def sums(self, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return sharded_weighted_gather(bank, slots, weights, self._processes, sparse_gradient=self.sparse_gradient)

    def sums_by_part(
        self, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, parts: torch.Tensor, num_parts: int
    ) -> torch.Tensor:
        return sharded_parted_gather(
            bank, slots, weights, parts, num_parts, self._processes, sparse_gradient=self.sparse_gradient
        )

    def products(self, vectors: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return sharded_gathered_products(vectors, bank, slots, self._processes, sparse_gradient=self.sparse_gradient)
