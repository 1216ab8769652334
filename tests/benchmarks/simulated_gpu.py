"""A GPU that exists as arithmetic: two clocks, that of the host and that of the device, and a queue between them."""

import time

import torch

# The fastest of an H200.
CLOCK_HZ = 1.98e9


class SimulatedGpu:
    """Stands in for `torch.cuda`, where it issues, sleeps, records and waits, and for the clock.

    Args:
        monkeypatch: Puts it in place.
    """

    def __init__(self, monkeypatch):
        self.host_ms = 0.0
        # When the device will have run all that was issued.
        self.device_ms = 0.0
        gpu, real_empty = self, torch.empty

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                self.at = max(gpu.host_ms, gpu.device_ms)

            def query(self) -> bool:
                return gpu.host_ms >= self.at

            def synchronize(self) -> None:
                gpu.host_ms = max(gpu.host_ms, self.at)

            def elapsed_time(self, end: "Event") -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.issue(0.0, 1e3 * cycles / CLOCK_HZ))
        monkeypatch.setattr(torch, "empty", lambda *size, device=None, **rest: real_empty(1, **rest))
        monkeypatch.setattr(time, "perf_counter", lambda: self.host_ms / 1e3)

    def issue(self, host_ms: float, device_ms: float) -> None:
        """Spend time of the host on one launch, and let the device run it when it comes to it."""
        self.host_ms += host_ms
        self.device_ms = max(self.host_ms, self.device_ms) + device_ms

    def synchronize(self) -> None:
        """Wait for the device."""
        self.host_ms = max(self.host_ms, self.device_ms)
