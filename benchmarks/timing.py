"""Time and memory of one call, on a CPU or a GPU."""

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_FLUSHED_BYTES = 1 << 29
"""Written between runs on a GPU: more than any level of its caches, and long enough to hide the launch that follows."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds over all runs: the median, and the 20th and 80th percentiles."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    runs: int

    @classmethod
    def of(cls, milliseconds: Iterable[float]) -> "Timing":
        ordered = sorted(milliseconds)
        return cls(percentile(ordered, 50), percentile(ordered, 20), percentile(ordered, 80), len(ordered))


@dataclass(frozen=True)
class Task:
    """What is timed.

    Args:
        run: Called with what `prepare` returned.
        prepare: Called before each run, outside the measurement. Default: nothing.
    """

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


class Stopwatch:
    """Times calls on one device: by CUDA events behind a flush of the caches, or by the clock."""

    def __init__(self, device: str):
        self.device = device
        self.flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device) if device == "cuda" else None

    def milliseconds(self, task: Task) -> float:
        """Prepare, and time one run."""
        state = task.prepare()
        if self.flushed is None:
            began = time.perf_counter()
            task.run(state)
            return 1e3 * (time.perf_counter() - began)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.zero_()
        start.record()
        task.run(state)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def interleaved(
    tasks: Mapping[str, Task], device: str, *, seconds: float, fewest: int = 5, most: int = 100
) -> dict[str, Timing]:
    """Time tasks in turn, round after round, so that what disturbs one disturbs all.

    Args:
        tasks: By name.
        device: `"cpu"` or `"cuda"`.
        seconds: Time for all of them together; it decides how many rounds there are.
        fewest: Rounds at least. Default: 5.
        most: Rounds at most. Default: 100.
    """
    stopwatch = Stopwatch(device)
    began = time.perf_counter()
    for task in tasks.values():
        stopwatch.milliseconds(task)  # warms up, and says how long a round takes
    taken = time.perf_counter() - began
    rounds = min(most, max(fewest, int(seconds / max(taken, 1e-6)) - 1))
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            times[name].append(stopwatch.milliseconds(task))
    return {name: Timing.of(measured) for name, measured in times.items()}


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """The most bytes that tensors held at once while `run` ran, beyond those held before.

    On a GPU as its allocator counts them; on a CPU by the record that PyTorch's profiler keeps of allocations, so
    neither the interpreter nor libraries that allocate for themselves are counted.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profile.kineto_results.events()  # type: ignore[union-attr]
        if event.name() == "[memory]"
    ]
    held = most = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        held += change
        most = max(most, held)
    return most


def release_memory(device: str) -> None:
    """Give back what no tensor holds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def percentile(ordered: list[float], percent: float) -> float:
    """Of ascending numbers, with linear interpolation."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
