"""What ran while something ran, kernel by kernel."""

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
    """Launches of one kernel, and their time on the device in microseconds; on a CPU calls of an operator, its own time."""

    kernel: str
    launches: int
    device_us: float


def kernels(run: Callable[[], object], device: str) -> list[KernelTime]:
    """Profile one run; the kernels that took longest first.

    On a GPU, copies and fills count as kernels, as they are launched like them, and what a replayed CUDA graph launches
    counts one by one.

    Args:
        run: What is profiled, warmed up before.
        device: `"cpu"` or `"cuda"`.
    """
    with profile(activities=_activities(device)) as profiler:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    found: dict[str, KernelTime] = {}
    for event in profiler.events():
        if device == "cuda" and not _is_kernel(event):
            continue
        before = found.get(event.name, KernelTime(event.name, 0, 0.0))
        time = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        found[event.name] = KernelTime(event.name, before.launches + 1, before.device_us + time)
    return sorted(found.values(), key=lambda kernel: (-kernel.device_us, kernel.kernel))


def _activities(device: str) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]


def _is_kernel(event: FunctionEvent) -> bool:
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation


def write_profile(this: Run, results: Path, benchmark: str, subject: str, found: list[KernelTime]) -> None:
    """Append a profile to `profile.csv`, a row a kernel.

    Args:
        this: The run that it belongs to.
        results: Folder of the CSV.
        benchmark: `"ops"` or `"model"`.
        subject: What was profiled, in words.
        found: Of `kernels`.
    """
    told = {**asdict(this), "benchmark": benchmark, "subject": subject}
    rows = [{**told, **asdict(one), "device_us": round(one.device_us, 3)} for one in found]
    append(rows, results / FILE)
