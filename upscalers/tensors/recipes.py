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
    """A way to make one output tensor."""

    shape: tuple[int, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Full names of the base tensors that the recipe is known to read, each name once. Default: none."""
        return ()

    @abstractmethod
    def build(self, read: "ReadTensor") -> "torch.Tensor":
        """Make the tensor, in float32 or wider, or in its source's dtype; `read` reads a tensor of the base by its full name."""


@dataclass(frozen=True)
class Copy(Recipe):
    """Recipe that copies the bytes of the base tensor `source`."""

    source: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return read(self.source)


@dataclass(frozen=True)
class Fill(Recipe):
    """Recipe that fills the tensor with one value."""

    value: float

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        value = torch.full((1,) * len(self.shape), self.value, dtype=torch.float64)  # one number, with strides
        return value.expand(self.shape)


@dataclass(frozen=True)
class Combine(Recipe):
    """Recipe for a linear combination of base tensors, `sum_i c_i x_i`; `terms` are the full names of x_i, with c_i."""

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
    """Recipe for a fresh tensor: `initialiser` fills a float32 tensor in place, drawing from a generator of the `seed`."""

    initialiser: Callable[["torch.Tensor", "torch.Generator"], None]
    seed: int

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        tensor = torch.empty(self.shape)
        self.initialiser(tensor, torch.Generator().manual_seed(self.seed))
        return tensor


@dataclass(frozen=True)
class Integers(Recipe):
    """Recipe for a tensor of int64, which `make` returns; it is stored in 64 bits whatever the dtype of the model."""

    make: Callable[[], "torch.Tensor"]

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return self.make()


@dataclass(frozen=True)
class RowRange:
    """A range of `count` successive rows of the tensor `source`, starting at row `first`; None for rows of zeros."""

    source: str | None
    first: int
    count: int


@dataclass(frozen=True)
class Rows(Recipe):
    """Recipe that stacks ranges of rows, from top to bottom. In a vector, every element is a row."""

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
