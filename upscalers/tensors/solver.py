"""Solvers, which make several tensors together."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upscalers.architecture.layer_tensors import LayerTensor, Projection
from upscalers.request.progress import Progress
from upscalers.tensors.recipes import Recipe

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor

# Numbers that a solver measured about one tensor: `{"layer": index, "tensor": name, ...}`.
Measurement = dict[str, Any]


@dataclass(frozen=True)
class Scratch:
    """Context of a solver: `read` for tensors of the base, a folder that is removed when the work is done, and the display."""

    read: "ReadTensor"
    folder: Path
    progress: Progress


class Solver(ABC):
    """Computes tensors that depend on each other, or on one long computation; `label` names it in progress displays."""

    # The most bytes that the solver writes into the scratch folder. Default: 0.
    scratch_bytes: int = 0
    # Number of threads that the solver computes with. Default: torch's, so that results may differ in the last bits between
    # machines.
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

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        raise AssertionError("tensors of a solver are made together, by the writer")


@dataclass(frozen=True)
class SolverStack(Recipe):
    """Recipe for a tensor whose rows are tensors that solvers make, one below the other."""

    parts: tuple[SolverTensor, ...]

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        raise AssertionError("tensors of a solver are made together, by the writer")


def solved_parts(recipe: Recipe) -> tuple[SolverTensor, ...]:
    """Return the recipes of the parts of a tensor that solvers make; empty if there are none."""
    if isinstance(recipe, SolverStack):
        return recipe.parts
    return (recipe,) if isinstance(recipe, SolverTensor) else ()


def stacked(tensors: Mapping[str, LayerTensor], parts: Iterable[tuple[Projection, SolverTensor]]) -> dict[str, Recipe]:
    """Return the recipes of a layer's tensors, by name, whose projections solvers make; projections of one tensor are stacked."""
    by_name: dict[str, list[SolverTensor]] = {}
    for projection, part in parts:
        by_name.setdefault(projection.name, []).append(part)
    return {
        name: pieces[0] if tensors[name].parts is None else SolverStack(tensors[name].shape, tuple(pieces))
        for name, pieces in by_name.items()
    }


def summary_table(measurements: Sequence[Measurement], with_seconds: bool = True) -> list[list[str]]:
    """Return a table with a row per kind of tensor: means of numbers with their lowest and highest values, and seconds summed."""
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
    mean, lowest, highest = sum(known) / len(known), min(known), max(known)
    return f"{mean:.3g}" if lowest == highest else f"{mean:.3g} ({lowest:.3g} to {highest:.3g})"
