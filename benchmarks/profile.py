"""Profile a call: the kernels that it ran, with their launches and times."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.tracked import Run, append

FILE = "profile.csv"


@dataclass(frozen=True)
class KernelTime:
    """Launches of one kernel and their time on the device in microseconds; on a CPU, calls of an operator and its own time."""

    kernel: str
    launches: int
    device_us: float


def kernels(run: Callable[[], object], device: str) -> list[KernelTime]:
    """Profile one call and return its kernels, the slowest first.

    On a GPU, copies and fills count as kernels because they are launched like kernels, and every kernel that a replayed
    CUDA graph launches counts.

    Args:
        run: Call to profile, which was warmed up before.
        device: `"cpu"` or `"cuda"`.
    """
    with profile(activities=_activities(device)) as profiler:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
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
    """Append a profile to `profile.csv`, one row per kernel.

    Args:
        this: Run of the profile.
        results: Folder of the CSV.
        benchmark: Name of the benchmark: `"ops"`, `"model"` or `"depth"`.
        subject: Name of the profiled work, for people.
        times: Kernels, from `kernels`.
    """
    shared = {**asdict(this), "benchmark": benchmark, "subject": subject}
    rows = [{**shared, **asdict(one), "device_us": round(one.device_us, 3)} for one in times]
    append(rows, results / FILE)
