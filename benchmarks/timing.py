"""Measure the time, the memory and the kernels of a call, on a CPU or a GPU."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.tracked import Run, append

# Bytes written between runs on a GPU to flush its caches: more than any cache holds.
_FLUSHED_BYTES = 1 << 29

# Cycles per millisecond of a clock that is faster than any GPU's, so that the device never sleeps for too short a
# time.
_CYCLES_PER_MS = 3_000_000

# Length of a sleep over the time that the host just needed to issue the same call.
_SLEEP_MARGIN = 3.0

_SHORTEST_SLEEP_MS = 0.2

# Longest sleep. A call that keeps the host busy for longer waits for the device, so no sleep could outlast the host.
_LONGEST_SLEEP_MS = 150.0

_FEWEST_ROUNDS = 5
_MOST_ROUNDS = 100

# Sleeps to try, each longer than the last, until one outlasts the host. None does if the call waits for the device.
_SLEEPS = 2


@dataclass(frozen=True)
class Lap:
    """Times of one run, in milliseconds.

    `ms` is the time of the device alone on a GPU, wall time on a CPU. On a GPU, `host_ms` is the wall time until all work was
    issued, and `wall_ms` the wall time from an idle device to the end. `queued` says whether all work was issued before the
    device began; if not, `ms` includes waiting for the host.
    """

    ms: float
    host_ms: float | None = None
    wall_ms: float | None = None
    queued: bool = True


@dataclass(frozen=True)
class Timing:
    """Median and percentiles of `Lap.ms` over all runs of a task, and medians of the other times; `queued` of every run."""

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
    """Call to time. Before each run `prepare` is called, which is not timed, and `run` gets its result."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


class Stopwatch:
    """Stopwatch for calls on one device.

    A GPU runs work that the host issues. If issuing takes longer than running, CUDA events around a call measure the
    host. Therefore each lap on a GPU runs twice, with flushed caches. The first run begins on an idle device and is
    timed by the clock. In the second run the device first sleeps, for longer than the host just needed, so that all
    launches of the call are queued before its events begin.
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
        """Run a task on an idle device; return the wall time in milliseconds until it was issued, and until it ended."""
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
        """Run a task behind a sleep; return its milliseconds on the device, and whether every launch was queued during the sleep."""
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
    tasks: Mapping[str, Task], device: str, *, seconds: float, fewest: int | None = None
) -> dict[str, Timing]:
    """Time tasks in turns, round after round, so that a disturbance hits all tasks alike; return the timings by name."""
    stopwatch = Stopwatch(device)
    began = time.perf_counter()
    for task in tasks.values():
        stopwatch.lap(task)  # warms up, and measures the length of a round
    taken = time.perf_counter() - began
    fewest = _FEWEST_ROUNDS if fewest is None else fewest
    rounds = min(_MOST_ROUNDS, max(fewest, int(seconds / max(taken, 1e-6)) - 1))
    laps: dict[str, list[Lap]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            laps[name].append(stopwatch.lap(task))
    return {name: Timing.of(measured) for name, measured in laps.items()}


def synchronize(device: str) -> None:
    """Wait until a GPU has run all issued work; on a CPU, do nothing."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Return the peak of the bytes that tensors held during `run`, beyond the bytes held before.

    A GPU's allocator counts the bytes. On a CPU, PyTorch's profiler records allocations, so memory of the interpreter
    and of libraries with their own allocators does not count.
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
    """Free the memory that no tensor holds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def percentile(ordered: list[float], percent: float) -> float:
    """Return a percentile of ascending numbers, with linear interpolation; `percent` is between 0 and 100."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that an allocation failed, on a GPU or on a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


# File of profiles.
PROFILES = "profile.csv"


@dataclass(frozen=True)
class KernelTime:
    """Launches of one kernel and their time on the device in microseconds; on a CPU, calls of an operator and its own time."""

    kernel: str
    launches: int
    device_us: float


def kernels(run: Callable[[], object], device: str) -> list[KernelTime]:
    """Profile one call, which was warmed up before, and return its kernels, the slowest first.

    On a GPU, copies and fills count as kernels because they are launched like kernels, and every kernel that a replayed
    CUDA graph launches counts.
    """
    with profile(activities=_activities(device)) as profiler:
        run()
        synchronize(device)
    by_name: dict[str, KernelTime] = {}
    for event in profiler.events():
        if device == "cuda" and not _is_kernel(event):
            continue
        before = by_name.get(event.name, KernelTime(event.name, 0, 0.0))
        time = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        by_name[event.name] = KernelTime(event.name, before.launches + 1, before.device_us + time)
    return sorted(by_name.values(), key=lambda kernel: (-kernel.device_us, kernel.kernel))


def _activities(device: str) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]


def _is_kernel(event: FunctionEvent) -> bool:
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation


def write_profile(this: Run, results: Path, benchmark: str, subject: str, times: list[KernelTime]) -> None:
    """Append the kernels of a profile to `profile.csv`, one per row."""
    shared = {**asdict(this), "benchmark": benchmark, "subject": subject}
    append([{**shared, **asdict(one), "device_us": round(one.device_us, 3)} for one in times], results / PROFILES)
