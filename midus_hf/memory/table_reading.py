"""How a memory reads rows of large tables: what training may change about it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from midus_hf.ops.column_shards import sharded_gathered_products, sharded_parted_gather, sharded_weighted_gather
from midus_hf.ops.gathered_products import gathered_products
from midus_hf.ops.parted_gather import parted_gather
from midus_hf.ops.weighted_gather import weighted_gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class TableReading:
    """Sums of rows and products with rows.

    Args:
        sparse_gradient: Whether gradients of tables are sparse tensors of the rows that were read. Default: false.
        columns_of: The processes that have a stretch of the columns each. Default: none, tables are whole.
    """

    sparse_gradient: bool = False
    columns_of: "ProcessGroup | None" = None

    def sums(self, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, backend: str) -> torch.Tensor:
        """As `weighted_gather`."""
        options: dict[str, Any] = {"sparse_gradient": self.sparse_gradient, "backend": backend}
        if self.columns_of is None:
            return weighted_gather(bank, slots, weights, **options)
        return sharded_weighted_gather(bank, slots, weights, self.columns_of, **options)

    def sums_by_part(
        self,
        bank: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
        parts: torch.Tensor,
        num_parts: int,
        backend: str,
    ) -> torch.Tensor:
        """As `parted_gather`."""
        options: dict[str, Any] = {"sparse_gradient": self.sparse_gradient, "backend": backend}
        if self.columns_of is None:
            return parted_gather(bank, slots, weights, parts, num_parts, **options)
        return sharded_parted_gather(bank, slots, weights, parts, num_parts, self.columns_of, **options)

    def products(self, vectors: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor, backend: str) -> torch.Tensor:
        """As `gathered_products`."""
        options: dict[str, Any] = {"sparse_gradient": self.sparse_gradient, "backend": backend}
        if self.columns_of is None:
            return gathered_products(vectors, bank, slots, **options)
        return sharded_gathered_products(vectors, bank, slots, self.columns_of, **options)
