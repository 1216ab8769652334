"""Recipes that put a tensor together from rows of other tensors, moving values without computing any."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from upscalers.tensors.recipes import Recipe

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor


@dataclass(frozen=True)
class RowRange:
    """A range of successive rows of a tensor.

    Args:
        source: Full name of the tensor that has the rows; None for rows of zeros.
        first: Index of the first row.
        count: Number of rows.
    """

    source: str | None
    first: int
    count: int


@dataclass(frozen=True)
class Rows(Recipe):
    """Recipe that stacks ranges of rows on top of each other. In a vector, every element is a row.

    Args:
        ranges: The ranges from top to bottom, which together make up the output.
    """

    ranges: tuple[RowRange, ...]

    def __post_init__(self) -> None:
        assert sum(rows.count for rows in self.ranges) == self.shape[0], (self.shape, self.ranges)

    @property
    def sources(self) -> tuple[str, ...]:
        """Full names of the tensors that rows are taken from, each name once."""
        return tuple(dict.fromkeys(rows.source for rows in self.ranges if rows.source is not None))

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        return torch.cat(
            [
                torch.zeros(rows.count, *self.shape[1:])
                if rows.source is None
                else read(rows.source)[rows.first : rows.first + rows.count]
                for rows in self.ranges
            ]
        )
