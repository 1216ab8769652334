"""Solvers, which make several tensors together, and a function that runs solvers in parallel."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upscalers.architecture.family import LayerTensor, Projection
from upscalers.machine.free_memory import available_bytes
from upscalers.machine.processors import num_processors
from upscalers.request.progress import Progress
from upscalers.tensors.recipes import Recipe

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor

# Numbers that a solver measured about one tensor: `{"layer": index, "tensor": name, ...}`.
Measurement = dict[str, Any]


@dataclass(frozen=True)
class Workplace:
    """Tools that a solver works with.

    Args:
        read: Function that reads a tensor of the base by its full name. Any thread may call it.
        scratch: Folder for temporary files, removed when the work is done. A solver's files have its label in their names.
        progress: Display that shows every step.
        cancelled: Event that is set when another solver failed or a person interrupted the run. Default: a new event.
    """

    read: "ReadTensor"
    scratch: Path
    progress: Progress
    cancelled: threading.Event = field(default_factory=threading.Event)

    def step(self, task: str, num_steps: int = 1) -> None:
        """Report steps of a task as done.

        Raises:
            Cancelled: If the work is to stop.
        """
        self.check()
        self.progress.step(task, num_steps)

    def check(self) -> None:
        """Stop here if the work is to stop. A solver calls `check`, or `step`, often.

        Raises:
            Cancelled: If the work is to stop.
        """
        if self.cancelled.is_set():
            raise Cancelled


class Cancelled(Exception):
    """Exception that ends a solver that was told to stop."""


class Solver(ABC):
    """Maker of several tensors that depend on each other, or on the same long computation.

    Args:
        label: Name of the solver in progress displays; each solver of a run has a different label.
    """

    # The most memory, in bytes, that the solver's matrices take at once.
    work_bytes: int
    # The most bytes that the solver writes into the scratch folder. Default: 0.
    scratch_bytes: int = 0
    # The most solvers that may run in parallel. Default: as many as processors and free memory allow.
    workers: int | None = None
    # Number of threads that the solver computes with. Default: its share of the processors, so that results may differ
    # in the last bits between machines.
    threads: int | None = None

    def __init__(self, label: str):
        self.label = label
        self.measurements: list[Measurement] = []

    @abstractmethod
    def solve(self, workplace: Workplace) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield each tensor with its key, in any order."""


@dataclass(frozen=True)
class Solved(Recipe):
    """Recipe for a tensor that a solver makes.

    Args:
        solver: The solver that makes this tensor together with others.
        key: The tensor's key among the tensors that the solver yields.
    """

    solver: Solver
    key: str

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        raise AssertionError("tensors of a solver are made together, by the writer")


@dataclass(frozen=True)
class Stacked(Recipe):
    """Recipe for a tensor whose rows are tensors that solvers make, one below the other.

    Args:
        parts: Recipes of the tensors, from the first rows to the last.
    """

    parts: tuple[Solved, ...]

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        raise AssertionError("tensors of a solver are made together, by the writer")


def solved_parts(recipe: Recipe) -> tuple[Solved, ...]:
    """Return the recipes of the parts of a tensor that solvers make; nothing if solvers make none."""
    if isinstance(recipe, Stacked):
        return recipe.parts
    return (recipe,) if isinstance(recipe, Solved) else ()


def stacked(tensors: Mapping[str, LayerTensor], parts: Iterable[tuple[Projection, Solved]]) -> dict[str, Recipe]:
    """Return the recipes of a layer's tensors, by name, whose projections solvers make; projections of one tensor are stacked."""
    by_name: dict[str, list[Solved]] = {}
    for projection, part in parts:
        by_name.setdefault(projection.name, []).append(part)
    return {
        name: of_tensor[0] if tensors[name].parts is None else Stacked(tensors[name].shape, tuple(of_tensor))
        for name, of_tensor in by_name.items()
    }


def solve_all(
    solvers: Sequence[Solver],
    workplace: Workplace,
    write: "Callable[[Solver, str, torch.Tensor], None]",
) -> None:
    """Run solvers in parallel, as many at once as `num_workers` returns, and write every tensor as soon as it is made.

    The solvers with the largest matrices start first, so that none of them runs alone at the end.

    Args:
        solvers: The solvers to run; each has a different label.
        workplace: Tools that the solvers work with.
        write: Function that takes each tensor, called by one thread at a time.
    """
    import torch

    labels = [solver.label for solver in solvers]
    assert len(set(labels)) == len(labels), labels
    workers = num_workers(solvers)
    threads_before = torch.get_num_threads()
    share = max(1, threads_before // workers)
    lock = threading.Lock()

    def run(solver: Solver) -> None:
        if workplace.cancelled.is_set():
            return
        torch.set_num_threads(solver.threads or share)
        try:
            for key, tensor in solver.solve(workplace):
                with lock:
                    write(solver, key, tensor)
        except Cancelled:
            pass
        except BaseException:
            workplace.cancelled.set()  # set before this thread takes the next solver from the pool
            raise

    largest_first = sorted(solvers, key=lambda solver: -solver.work_bytes)
    try:
        with ThreadPoolExecutor(workers, thread_name_prefix="solver") as pool:
            try:
                futures: list[Future[None]] = [pool.submit(run, solver) for solver in largest_first]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                workplace.cancelled.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(threads_before)


def workers_on(device: str, workers: int | None) -> int | None:
    """Return `workers`, or by default 1 on an accelerator, whose memory solvers would share; None stands for no limit."""
    return 1 if workers is None and not device.startswith("cpu") else workers


def num_workers(solvers: Sequence[Solver]) -> int:
    """Return how many solvers run in parallel.

    If any solver sets `workers`, the lowest of these limits decides. Otherwise one solver runs per processor, or fewer
    where their matrices would take more than half of the free memory.
    """
    limits = [solver.workers for solver in solvers if solver.workers is not None]
    if limits:
        return max(1, min(*limits, len(solvers)))
    largest = max(solver.work_bytes for solver in solvers)
    return max(1, min(num_processors(), len(solvers), available_bytes() // 2 // max(1, largest)))


def summary_table(measurements: Sequence[Measurement], with_seconds: bool = True) -> list[list[str]]:
    """Return a table with a header and one row per kind of tensor.

    A cell has the mean of a number and, in brackets, its lowest and highest value.

    Args:
        measurements: One measurement per tensor that a solver made; at least one.
        with_seconds: Whether to show seconds, summed. Seconds differ from run to run. Default: True.
    """
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
