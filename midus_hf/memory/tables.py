"""Tables that the layers of a memory share, and the reading of rows of large tables."""

from dataclasses import dataclass
from typing import Any

import torch

from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.ops.chapters.quantisation import dequantise_rows
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

    def products(self, vectors: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return products of vectors with rows, as `gathered_products` does."""
        options: dict[str, Any] = {"sparse_gradient": self.sparse_gradient}
        return gathered_products(vectors, bank, slots, **options)


class MemoryTables(DeclaredModule):
    """Tables that several layers read. The model holds them, so they are saved, counted and sharded once."""

    def forward(self) -> dict[str, torch.Tensor]:
        """Return the tables by name; tables are read by this call, so that the hooks of offloading and sharding run first."""
        return {name: self.declared_tensor(name) for name in self.declared}


def read_rows(
    integers: torch.Tensor, scales: torch.Tensor, bits: int, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table of dequantised rows, and the row of this table that each slot reads.

    Only rows that slots name are dequantised, so that a pass of few tokens never holds the whole table; or all rows, if slots name
    more rows than the table has.

    Args:
        integers: `[N, W]`, int8, or for 4 bits `[N, W / 2]`, uint8.
        scales: `[N]`, floating point.
        bits: Bits per integer, 8 or 4.
        slots: int64, of any shape, `0 <= slot < N`.
        dtype: Dtype of the rows.

    Returns:
        Rows `[R, W]`, and slots in the shape of `slots`, which count these rows.
    """
    # While a graph is traced, the number of slots may be unknown, and a comparison would fix it.
    if not torch.compiler.is_compiling() and slots.numel() >= len(integers):
        return dequantise_rows(integers, scales, bits, dtype), slots
    named = slots.flatten()
    places = torch.arange(named.shape[0], device=slots.device).view_as(slots)
    return dequantise_rows(integers[named], scales[named], bits, dtype), places
