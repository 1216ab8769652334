"""Recipes: how each output tensor is made, or several by a solver."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upscalers.architecture.layer_tensors import Config, LayerTensor, Projection
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.request import Progress

if TYPE_CHECKING:
    import torch

    ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """A way to make one output tensor: of chunks of others, whole, or by a solver."""

    shape: tuple[int, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Full names of the base tensors that the recipe is known to read, each name once. Default: none."""
        return ()


@dataclass(frozen=True)
class Elementwise(Recipe, ABC):
    """Recipe whose elements are each made of the same element of base tensors, so that chunks suffice."""

    @property
    @abstractmethod
    def operands(self) -> tuple[str, ...]:
        """Full names of the base tensors that `combine` takes, in its order."""

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.operands))

    @abstractmethod
    def combine(self, *values: "torch.Tensor") -> "torch.Tensor":
        """Combine the operands, or the same part of each."""


@dataclass(frozen=True)
class Built(Recipe, ABC):
    """Recipe for a tensor that is made as a whole."""

    @abstractmethod
    def build(self, read: "ReadTensor") -> "torch.Tensor":
        """Make the tensor, in float32 or wider, or its source's dtype; `read` reads base tensors by name."""


@dataclass(frozen=True)
class Copy(Elementwise):
    """Recipe that copies the bytes of the base tensor `source`."""

    source: str

    @property
    def operands(self) -> tuple[str, ...]:
        return (self.source,)

    def combine(self, *values: "torch.Tensor") -> "torch.Tensor":
        (value,) = values
        return value


@dataclass(frozen=True)
class Fill(Built):
    """Recipe that fills the tensor with one value."""

    value: float

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        value = torch.full((1,) * len(self.shape), self.value, dtype=torch.float64)  # one number, with strides
        return value.expand(self.shape)


@dataclass(frozen=True)
class Combine(Elementwise):
    """Recipe for `sum_i c_i x_i` of base tensors; `terms` are the full names of x_i, with c_i."""

    terms: tuple[tuple[str, float], ...]

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.terms)

    def combine(self, *values: "torch.Tensor") -> "torch.Tensor":
        """Combine the sources, or the same part of each, in float32, or float64 if any source is."""
        import torch

        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        (_, coefficient), *others = self.terms
        total = values[0].to(dtype) * coefficient
        for (_, coefficient), value in zip(others, values[1:], strict=True):
            total.add_(value.to(dtype), alpha=coefficient)
        return total


@dataclass(frozen=True)
class Initialise(Built):
    """Recipe for a fresh float32 tensor that `initialiser` fills in place, with a generator of the `seed`."""

    initialiser: Callable[["torch.Tensor", "torch.Generator"], None]
    seed: int

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        tensor = torch.empty(self.shape)
        self.initialiser(tensor, torch.Generator().manual_seed(self.seed))
        return tensor


@dataclass(frozen=True)
class Integers(Built):
    """Recipe for an int64 tensor, which `make` returns, stored so whatever the dtype of the model."""

    make: Callable[[], "torch.Tensor"]

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return self.make()


@dataclass(frozen=True)
class RowRange:
    """Rows `first` to `first + count` of the tensor `source`; None for rows of zeros."""

    source: str | None
    first: int
    count: int


@dataclass(frozen=True)
class Rows(Built):
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


@dataclass(frozen=True)
class LayerBlocks(Built):
    """Recipe that picks one of the `num_blocks` blocks along `dim` of `source` per layer of the result."""

    source: str
    dim: int
    num_blocks: int
    blocks: tuple[int, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        import torch

        parts = read(self.source).unflatten(self.dim, (self.num_blocks, -1))
        return parts.index_select(self.dim, torch.tensor(self.blocks)).flatten(self.dim, self.dim + 1)


def block_recipes(model: BaseCheckpoint, layers: Sequence[int], config: Config) -> dict[str, LayerBlocks]:
    """Return recipes by full name for tensors outside layers with a block per layer of the result."""
    before = model.num_layers
    after = len(layers)
    if list(layers) == list(range(before)):
        return {}
    recipes = {}
    outer = layout_of(config).outer
    for name, shape in model.layout.outer.items():
        sizes = zip(shape, outer.get(name, shape), strict=True)
        dims = [dim for dim, (size, wanted) in enumerate(sizes) if size != wanted and size * after == wanted * before]
        for dim in dims:
            resized = (*shape[:dim], shape[dim] // before * after, *shape[dim + 1 :])
            full = model.prefix + name.removeprefix("model.")
            recipes[full] = LayerBlocks(resized, full, dim, before, tuple(layers))
    return recipes


# Numbers that a solver measured about one tensor: `{"layer": index, "tensor": name, ...}`.
Measurement = dict[str, Any]


@dataclass(frozen=True)
class Scratch:
    """Context of a solver: a reader of base tensors, a temporary folder, and the display."""

    read: "ReadTensor"
    folder: Path
    progress: Progress


class Solver(ABC):
    """Computes tensors that depend on each other or on one long computation; `label` is for displays."""

    # Bytes in the scratch folder, at most. Default: 0.
    scratch_bytes: int = 0
    # Threads of the solver. Default: torch's: the last bits of results may differ between machines.
    threads: int | None = None

    def __init__(self, label: str):
        self.label = label
        self.measurements: list[Measurement] = []

    @abstractmethod
    def solve(self, scratch: Scratch) -> "Iterator[tuple[str, torch.Tensor]]":
        """Begin a stage of the progress, and yield each tensor with its key, in any order."""


@dataclass(frozen=True)
class SolverTensor(Recipe):
    """Recipe for the tensor that a solver yields under `key`."""

    solver: Solver
    key: str


@dataclass(frozen=True)
class SolverStack(Recipe):
    """Recipe for a tensor whose rows are tensors that solvers make, one below the other."""

    parts: tuple[SolverTensor, ...]


def solved_parts(recipe: Recipe) -> tuple[SolverTensor, ...]:
    """Return the recipes of the parts of a tensor that solvers make; empty if there are none."""
    if isinstance(recipe, SolverStack):
        return recipe.parts
    return (recipe,) if isinstance(recipe, SolverTensor) else ()


def stacked(tensors: Mapping[str, LayerTensor], parts: Iterable[tuple[Projection, SolverTensor]]) -> dict[str, Recipe]:
    """Return recipes of tensors by name from solved projections; those of one tensor are stacked."""
    by_name: dict[str, list[SolverTensor]] = {}
    for projection, part in parts:
        by_name.setdefault(projection.name, []).append(part)
    return {
        name: pieces[0] if tensors[name].parts is None else SolverStack(tensors[name].shape, tuple(pieces))
        for name, pieces in by_name.items()
    }


def summary_table(measurements: Sequence[Measurement], with_seconds: bool = True) -> list[list[str]]:
    """Return a table with a row per kind of tensor: means (lowest to highest), and seconds summed."""
    left_out = ("layer", "tensor") if with_seconds else ("layer", "tensor", "seconds")
    columns = [key for key in measurements[0] if key not in left_out]
    rows = [["tensor", "layers", *(column.replace("_", " ") for column in columns)]]
    for tensor in dict.fromkeys(row["tensor"] for row in measurements):
        group = [row for row in measurements if row["tensor"] == tensor]
        rows.append(
            [tensor, str(len(group)), *(_cell(column, [row.get(column) for row in group]) for column in columns)]
        )
    return rows


def _cell(column: str, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    if column == "seconds":
        return f"{sum(known):.1f}"
    mean = sum(known) / len(known)
    lowest = min(known)
    highest = max(known)
    return f"{mean:.3g}" if lowest == highest else f"{mean:.3g} ({lowest:.3g} to {highest:.3g})"
