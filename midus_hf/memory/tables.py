"""Tables that the layers of a memory share, and the reading of rows of large tables."""

from dataclasses import dataclass
from typing import Any

import torch

from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.ops.chapters.rows import with_one_gradient
from midus_hf.ops.gather.parted import parted_gather
from midus_hf.ops.gather.products import gathered_products
from midus_hf.ops.gather.weighted import weighted_gather


@dataclass
class TableReading:
    """Sums of rows of a table, and products with rows.

    Args:
        sparse_gradient: Whether gradients of tables are sparse tensors of the rows that were read. Default: false.
    """

    sparse_gradient: bool = False

    def sums(self, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return weighted sums of rows, as `weighted_gather` does."""
        options: dict[str, Any] = {"sparse_gradient": self.sparse_gradient}
        return weighted_gather(bank, slots, weights, **options)

    def sums_by_part(
        self,
        bank: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
        parts: torch.Tensor,
        num_parts: int,
    ) -> torch.Tensor:
        """Return weighted sums of rows per part, as `parted_gather` does."""
        options: dict[str, Any] = {"sparse_gradient": self.sparse_gradient}
        return parted_gather(bank, slots, weights, parts, num_parts, **options)

    def products(self, vectors: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return products of vectors with rows, as `gathered_products` does."""
        options: dict[str, Any] = {"sparse_gradient": self.sparse_gradient}
        return gathered_products(vectors, bank, slots, **options)


class LentTables(dict[str, torch.Tensor]):
    """Tables of one forward pass, by name."""

    def __init__(self, tables: dict[str, torch.Tensor]):
        super().__init__(tables)
        self._with_one_gradient: dict[str, torch.Tensor] = {}

    def with_one_gradient(self, name: str) -> torch.Tensor:
        """Return a table to which several layers give sparse gradients. The sum of these gradients is made dense once."""
        if name not in self._with_one_gradient:
            self._with_one_gradient[name] = with_one_gradient(self[name])
        return self._with_one_gradient[name]


class MemoryTables(DeclaredModule):
    """Tables that several layers read. The model holds them, so they are saved, counted and sharded once."""

    def forward(self) -> dict[str, torch.Tensor]:
        """Return the tables by name; tables are read by this call, so that the hooks of offloading and sharding run first."""
        tables = {name: self.declared_tensor(name) for name in self.declared}
        return tables if torch.compiler.is_compiling() else LentTables(tables)
