"""Solvers: tensors that have to be made together, and the crew that makes them side by side."""

import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upscalers.machine.free_memory import available_bytes
from upscalers.machine.processors import num_processors
from upscalers.request.progress import Progress
from upscalers.tensors.recipes import Recipe

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor

Measurement = dict[str, Any]
"""What a solver found out about one tensor: `{"layer": index, "tensor": name, ...}` and numbers."""


@dataclass(frozen=True)
class Workplace:
    """What a solver works with.

    Args:
        read: Reads a tensor of the base by its full name; any thread may call it.
        scratch: A folder for temporary files, gone when the work is done; no two solvers that work at once have the same.
        progress: Told of every step.
        cancelled: Set when another solver failed, or a person gave up.
    """

    read: "ReadTensor"
    scratch: Path
    progress: Progress
    cancelled: threading.Event = field(default_factory=threading.Event)

    def step(self, task: str, num_steps: int = 1) -> None:
        """Tell of steps done.

        Raises:
            Cancelled: If the work is to stop.
        """
        self.check()
        self.progress.step(task, num_steps)

    def check(self) -> None:
        """Stop here if the work is to stop; a solver calls this, or `step`, often.

        Raises:
            Cancelled: If it is.
        """
        if self.cancelled.is_set():
            raise Cancelled


class Cancelled(Exception):
    """A solver was told to stop."""


class Solver(ABC):
    """Makes several tensors that depend on each other, or on the same long computation.

    Args:
        label: What progress calls it; no other solver of the run has it.
    """

    work_bytes: int
    """Most memory that its matrices take at once, in bytes."""
    scratch_bytes: int = 0
    """Most that it writes into the scratch folder, in bytes."""
    workers: int | None = None
    """Most solvers that may work at once. Default: as many as processors and free memory allow."""
    threads: int | None = None
    """Threads that it computes with. Default: its share of the processors, so that results may differ in the last bits
    from one machine to another."""

    def __init__(self, label: str):
        self.label = label
        self.measurements: list[Measurement] = []

    @abstractmethod
    def solve(self, place: Workplace) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield each tensor under its key, in any order."""


@dataclass(frozen=True)
class Solved(Recipe):
    """A tensor that a solver makes.

    Args:
        solver: Makes it, with others.
        key: Its name among them.
    """

    solver: Solver
    key: str

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        raise AssertionError("tensors of a solver are made together, by the writer")


def solve_all(
    solvers: Sequence[Solver],
    place: Workplace,
    write: "Callable[[Solver, str, torch.Tensor], None]",
) -> None:
    """Run solvers side by side, as many at once as `num_workers` says, and hand over every tensor as it is made.

    Those with the largest matrices begin, so that none of them is left alone at the end.

    Args:
        solvers: To run; no two have the same label.
        place: What they work with; each has a folder of its own inside its scratch folder.
        write: Takes each tensor; called by one thread at a time.
    """
    import torch

    labels = [solver.label for solver in solvers]
    assert len(set(labels)) == len(labels), labels
    workers = num_workers(solvers)
    threads_before = torch.get_num_threads()
    share = max(1, threads_before // workers)
    lock = threading.Lock()

    def run(solver: Solver) -> None:
        if place.cancelled.is_set():
            return
        torch.set_num_threads(solver.threads or share)
        try:
            with tempfile.TemporaryDirectory(
                dir=place.scratch
            ) as own:  # whatever its files are called, it is alone here
                for key, tensor in solver.solve(replace(place, scratch=Path(own))):
                    with lock:
                        write(solver, key, tensor)
        except Cancelled:
            pass
        except BaseException:
            place.cancelled.set()  # here already, or this thread would begin the next one
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
                place.cancelled.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(threads_before)


def num_workers(solvers: Sequence[Solver]) -> int:
    """How many solvers work at once: one per processor, unless half of the free memory or the solvers' own limit is less."""
    limits = [solver.workers for solver in solvers if solver.workers is not None]
    if limits:
        return max(1, min(*limits, len(solvers)))
    largest = max(solver.work_bytes for solver in solvers)
    return max(1, min(num_processors(), len(solvers), available_bytes() // 2 // max(1, largest)))
