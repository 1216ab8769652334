"""Recipes: how one output tensor comes to be."""

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
    """How one output tensor comes to be.

    Args:
        shape: Of the output.
    """

    shape: tuple[int, ...]

    @abstractmethod
    def build(self, read: "ReadTensor") -> "torch.Tensor":
        """Make the tensor, in float32 or more, or the dtype of its source; it is cast once, when it is written.

        Args:
            read: Reads a tensor of the base by its full name.
        """


@dataclass(frozen=True)
class Copy(Recipe):
    """The bytes of a base tensor.

    Args:
        source: Full name in the base.
    """

    source: str

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return read(self.source)


@dataclass(frozen=True)
class Fill(Recipe):
    """One value everywhere.

    Args:
        value: The value.
    """

    value: float

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        return torch.tensor(self.value, dtype=torch.float64).expand(self.shape)


@dataclass(frozen=True)
class Combine(Recipe):
    """A linear combination of base tensors, `constant + sum_i c_i x_i`, element by element.

    Args:
        terms: Full names in the base, each with its coefficient.
        constant: Added everywhere. Default: 0.
    """

    terms: tuple[tuple[str, float], ...]
    constant: float = 0.0

    def combine(self, *values: "torch.Tensor") -> "torch.Tensor":
        """Combine the sources, or the same stretch of each; float32, or float64 where a source is."""
        import torch

        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        (_, coefficient), *others = self.terms
        total = values[0].to(dtype) * coefficient
        for (_, coefficient), value in zip(others, values[1:], strict=True):
            total.add_(value.to(dtype), alpha=coefficient)
        return total.add_(self.constant) if self.constant else total

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return self.combine(*(read(source) for source, _ in self.terms))


@dataclass(frozen=True)
class Initialise(Recipe):
    """A fresh tensor, random or not.

    Args:
        initialiser: Fills a float32 tensor in place, drawing from the generator.
        seed: The same seed, the same bytes, whatever else is built.
    """

    initialiser: Callable[["torch.Tensor", "torch.Generator"], None]
    seed: int

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        tensor = torch.empty(self.shape)
        self.initialiser(tensor, torch.Generator().manual_seed(self.seed))
        return tensor


def tensor_seed(seed: int, name: str) -> int:
    """A seed of its own for every tensor, from the seed of the run and the tensor's full name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
