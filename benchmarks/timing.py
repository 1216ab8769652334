"""Time and memory of one call, on a CPU or a GPU."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_FLUSHED_BYTES = 1 << 29
"""Written between runs on a GPU: more than any level of its caches."""

_CYCLES_PER_MS = 3_000_000
"""Of a clock that no GPU reaches, so that the device never sleeps less than it is told to."""

_SLEEP_MARGIN = 3.0
"""A sleep lasts so many times what the host needed to issue the same call just before."""

_SHORTEST_SLEEP_MS = 0.2

_LONGEST_SLEEP_MS = 150.0
"""A call that keeps the host for longer waits for the device, and no sleep outlasts that."""

_FEWEST_ROUNDS = 5

_SLEEPS = 2
"""Of growing length, until one outlasts the host. None does where a call waits for the device on its way."""


@dataclass(frozen=True)
class Lap:
    """Milliseconds of one run.

    Args:
        ms: On a GPU the time of the device alone; on a CPU the wall time.
        host_ms: On a GPU until everything was issued, by a clock that nobody made wait; None on a CPU.
        wall_ms: On a GPU from an idle device to the end of all that was issued; None on a CPU.
        queued: Whether everything was issued before the device began; if not, `ms` has waiting for the host in it.
    """

    ms: float
    host_ms: float | None = None
    wall_ms: float | None = None
    queued: bool = True


@dataclass(frozen=True)
class Timing:
    """Milliseconds over all runs.

    Args:
        median_ms: Of the device alone on a GPU, of the wall time on a CPU.
        p20_ms: Its 20th percentile.
        p80_ms: Its 80th percentile.
        runs: How many there were.
        host_ms: Median time of the host, on a GPU. Default: None, as on a CPU.
        wall_ms: Median wall time, on a GPU. Default: None, as on a CPU, where it would repeat `median_ms`.
        queued: Whether the device had no host to wait for, in all runs. Default: true.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    runs: int
    host_ms: float | None = None
    wall_ms: float | None = None
    queued: bool = True

    @classmethod
    def of(cls, laps: Iterable[Lap]) -> "Timing":
        laps = list(laps)
        ordered = sorted(lap.ms for lap in laps)
        hosts = [lap.host_ms for lap in laps if lap.host_ms is not None]
        walls = [lap.wall_ms for lap in laps if lap.wall_ms is not None]
        return cls(
            percentile(ordered, 50),
            percentile(ordered, 20),
            percentile(ordered, 80),
            len(ordered),
            statistics.median(hosts) if hosts else None,
            statistics.median(walls) if walls else None,
            all(lap.queued for lap in laps),
        )


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
    """Times calls on one device.

    A GPU runs what the host has issued. Where issuing takes longer than running, CUDA events around a call time the host;
    so two runs are timed there. One begins on an idle device and is timed by the clock. In the other the device sleeps
    first, for longer than the host just needed, so that all launches of the call are queued up when its events begin.
    Both begin with flushed caches.

    Args:
        device: `"cpu"` or `"cuda"`.
    """

    def __init__(self, device: str):
        self.device = device
        self.flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device) if device == "cuda" else None

    def lap(self, task: Task) -> Lap:
        """Time a task once."""
        host_ms, wall_ms = self._from_idle(task)
        if self.flushed is None:
            return Lap(wall_ms)
        sleep_ms = max(_SHORTEST_SLEEP_MS, _SLEEP_MARGIN * host_ms)
        for _ in range(_SLEEPS):
            sleep_ms = min(sleep_ms, _LONGEST_SLEEP_MS)
            device_ms, queued = self._behind_sleep(task, self.flushed, sleep_ms)
            if queued or sleep_ms == _LONGEST_SLEEP_MS:
                break
            sleep_ms *= _SLEEP_MARGIN
        return Lap(device_ms, host_ms, wall_ms, queued)

    def _from_idle(self, task: Task) -> tuple[float, float]:
        """Milliseconds until a run has been issued, and until it has ended, by the clock."""
        state = task.prepare()
        if self.flushed is not None:
            self.flushed.zero_()
        synchronize(self.device)
        began = time.perf_counter()
        task.run(state)
        issued = time.perf_counter()
        synchronize(self.device)
        return 1e3 * (issued - began), 1e3 * (time.perf_counter() - began)

    @staticmethod
    def _behind_sleep(task: Task, flushed: torch.Tensor, sleep_ms: float) -> tuple[float, bool]:
        """Milliseconds of a run on the device, and whether all of it had been issued when the device began."""
        state = task.prepare()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        torch.cuda._sleep(math.ceil(sleep_ms * _CYCLES_PER_MS))
        start.record()
        task.run(state)
        end.record()
        queued = not start.query()
        end.synchronize()
        return start.elapsed_time(end), queued


def interleaved(
    tasks: Mapping[str, Task], device: str, *, seconds: float, fewest: int | None = None, most: int = 100
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
        stopwatch.lap(task)  # warms up, and says how long a round takes
    taken = time.perf_counter() - began
    fewest = _FEWEST_ROUNDS if fewest is None else fewest
    rounds = min(most, max(fewest, int(seconds / max(taken, 1e-6)) - 1))
    laps: dict[str, list[Lap]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            laps[name].append(stopwatch.lap(task))
    return {name: Timing.of(measured) for name, measured in laps.items()}


def synchronize(device: str) -> None:
    """Wait until a GPU has run all that was issued to it; nothing on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


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
