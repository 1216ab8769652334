"""Rows of values in each other's places."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from upscalers.tensors.recipes import Recipe

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor


@dataclass(frozen=True)
class PermutedRows(Recipe):
    """The rows of a table, the dimension before the last, in another order: none stays where it was.

    Args:
        source: Full name of the table, which has two rows or more. Where it has more dimensions, all that stand in front have the
            same order.
        seed: The same seed and number of rows, the same order.
    """

    source: str
    seed: int

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return read(self.source).index_select(-2, row_order(self.shape[-2], self.seed))


def row_order(rows: int, seed: int) -> "torch.Tensor":
    """For each place `[rows]`, which row comes to it: one random cycle through all of them.

    Args:
        rows: How many, two or more.
        seed: Of the cycle.
    """
    import torch

    cycle = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    return order
