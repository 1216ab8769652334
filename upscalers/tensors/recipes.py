"""Recipes: how to make one output tensor."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Recipe(ABC):
    """A way to make one output tensor.

    Args:
        shape: Shape of the output tensor.
    """

    shape: tuple[int, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Full names of the base tensors that the recipe is known to read, each name once. Default: none."""
        return ()

    @abstractmethod
    def build(self, read: "ReadTensor") -> "torch.Tensor":
        """Make the tensor, in float32 or wider, or in the dtype of its source; the writer casts the tensor once.

        Args:
            read: Function that reads a tensor of the base by its full name.
        """


@dataclass(frozen=True)
class Copy(Recipe):
    """Recipe that copies the bytes of a base tensor.

    Args:
        source: Full name of the tensor in the base.
    """

    source: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return read(self.source)


@dataclass(frozen=True)
class Fill(Recipe):
    """Recipe that fills the tensor with one value.

    Args:
        value: The value of every element.
    """

    value: float

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        value = torch.full(
            (1,) * len(self.shape), self.value, dtype=torch.float64
        )  # a single number needs strides of its own
        return value.expand(self.shape)


@dataclass(frozen=True)
class Combine(Recipe):
    """Recipe for a linear combination of base tensors, `sum_i c_i x_i`, element by element.

    Args:
        terms: Full names of the tensors x_i in the base, each with its coefficient c_i.
    """

    terms: tuple[tuple[str, float], ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self.terms))

    def combine(self, *values: "torch.Tensor") -> "torch.Tensor":
        """Combine the sources, or the same part of each source, in float32, or in float64 if any source is float64."""
        import torch

        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        (_, coefficient), *others = self.terms
        total = values[0].to(dtype) * coefficient
        for (_, coefficient), value in zip(others, values[1:], strict=True):
            total.add_(value.to(dtype), alpha=coefficient)
        return total

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return self.combine(*(read(source) for source, _ in self.terms))


@dataclass(frozen=True)
class Initialise(Recipe):
    """Recipe for a fresh tensor, random or not.

    Args:
        initialiser: Function that fills a float32 tensor in place, drawing random numbers from the generator.
        seed: Seed of the generator. The same seed gives the same bytes, whatever other tensors are made.
    """

    initialiser: Callable[["torch.Tensor", "torch.Generator"], None]
    seed: int

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        tensor = torch.empty(self.shape)
        self.initialiser(tensor, torch.Generator().manual_seed(self.seed))
        return tensor


@dataclass(frozen=True)
class Integers(Recipe):
    """Recipe for a tensor of integers, which is stored in 64 bits whatever the dtype of the model.

    Args:
        make: Function that returns the tensor, int64.
    """

    make: Callable[[], "torch.Tensor"]

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return self.make()


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


def tensor_seed(seed: int, name: str) -> int:
    """Return a separate seed for each tensor, made from the seed of the run and the tensor's full name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
