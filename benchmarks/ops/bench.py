"""Measure one case: correctness, memory, time and kernels; one row per provider and mode."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ops.gate import Expected, Verdict, small_case
from benchmarks.ops.names import COMPILED, OURS
from benchmarks.ops.registry import OPS, PROVIDERS, Call, Inputs, Provider, Unavailable, make_inputs
from benchmarks.ops.row import Measured, Row, key, key_of, row_of
from benchmarks.ops.shapes import Case
from benchmarks.profile import KernelTime, kernels
from benchmarks.recorded import Recorded, say
from benchmarks.timing import Task, Timing, peak_bytes, release_memory, synchronize

# Providers whose kernels are profiled: the choice of the ops themselves, and the providers that it should beat.
PROFILED = (OURS, "exact", "one-block", "kept-values", *COMPILED)


class Bench:
    """One run of the benchmark.

    Args:
        record: The run, and its file of rows.
        only: Providers to measure; None for all.
        modes: Modes to measure, of `MODES`.
        seconds: Seconds of timing per case and mode.
        profiled: Popularity whose cases are profiled. Default: None, no case.
    """

    def __init__(
        self, record: Recorded, only: list[str] | None, modes: list[str], seconds: float, profiled: str | None = None
    ):
        self.record, self.only, self.modes, self.seconds, self.profiled = record, only, modes, seconds, profiled
        self.measured_before = frozenset(map(key_of, record.before))
        record.troubles += [
            f"{' '.join(key_of(row))}: {row['status']} before"
            for row in record.before
            if row["status"] in ("refused", "failed")
        ]

    def measure(self, case: Case) -> None:
        """Judge every provider on the small and the timed shape, and time the providers that are right."""
        wanted = self._wanted(case)
        if not wanted:
            say(f"{case}: measured before")
            return
        say(str(case))
        chosen = [PROVIDERS[case.op][name] for name in wanted]
        worst: dict[str, Verdict] = {}
        for gated in dict.fromkeys((small_case(case), case)):
            inputs = make_inputs(gated)
            calls = self._built(gated, case, chosen, inputs)
            if not calls:
                return
            expected = Expected(gated, inputs)
            chosen = [
                provider
                for provider in chosen
                if provider.name in calls
                and self._is_right(gated, case, provider, calls[provider.name], inputs, expected, worst)
            ]
        upstream = expected.upstream
        del expected
        release_memory(case.device)
        for mode in dict.fromkeys(mode for modes in wanted.values() for mode in modes):
            able = {provider.name: calls[provider.name] for provider in chosen if mode in wanted[provider.name]}
            self._time(case, mode, able, inputs, upstream, worst)

    def _wanted(self, case: Case) -> dict[str, list[str]]:
        """Return the modes that are left to measure, per provider that has any left."""
        modes = self.modes if case.tokens > 1 else ["forward"]  # one token is generated, not trained on
        wanted = {
            name: [
                mode for mode in modes if mode in provider.modes and key(case, name, mode) not in self.measured_before
            ]
            for name, provider in PROVIDERS[case.op].items()
            if (self.only is None or name in self.only) and key(case, name, "") not in self.measured_before
        }
        return {name: left for name, left in wanted.items() if left}

    def _built(self, gated: Case, case: Case, chosen: list[Provider], inputs: Inputs) -> dict[str, Call]:
        """Return the calls of the providers that can run here."""
        calls = {}
        for provider in chosen:
            try:
                calls[provider.name] = provider.build(gated, inputs)
            except Unavailable as reason:
                say(f"  {provider.name}: not measured, {reason}")
            except Exception as error:
                self._trouble(case, provider.name, "", error)
        return calls

    def _is_right(
        self,
        gated: Case,
        case: Case,
        provider: Provider,
        call: Call,
        inputs: Inputs,
        expected: Expected,
        worst: dict[str, Verdict],
    ) -> bool:
        """Return whether the gate lets the provider pass; keep the provider's largest error in `worst`."""
        try:
            verdict = expected.judge(provider, call, inputs)
        except Exception as error:
            self._trouble(case, provider.name, "", error)
            return False
        if not verdict.passes:
            message = (
                f"{case}, {provider.name}: {verdict.error_of} differs from float64 by {verdict.error:.2e} (RMS ratio, "
                f"{gated.tokens} tokens); at most {verdict.tolerance:.0e} is right. It is not timed."
            )
            self.record.trouble(message)
            self.record.append(row_of(self.record.run, case, provider.name, "", "refused", verdict))
            return False
        if provider.name not in worst or verdict.error > worst[provider.name].error:
            worst[provider.name] = verdict
        return True

    def _time(
        self,
        case: Case,
        mode: str,
        calls: dict[str, Call],
        inputs: Inputs,
        upstream: torch.Tensor,
        verdicts: dict[str, Verdict],
    ) -> None:
        tasks, peaks = {}, {}
        for name, call in calls.items():
            task = _task(mode, call, [inputs[leaf] for leaf in OPS[case.op].leaves], upstream)
            try:
                task.run(task.prepare())  # compiles and fills caches, which are no part of the peak
                peaks[name] = peak_bytes(lambda task=task: task.run(task.prepare()), case.device)
            except Exception as error:
                self._trouble(case, name, mode, error, verdicts[name])
                continue
            tasks[name] = task
        rows = []

        def failed(name: str, error: Exception) -> None:
            self._trouble(case, name, mode, error, verdicts[name])

        for name, timing in self.record.timed(f"  {mode}", tasks, self.seconds, failed).items():
            measured = Measured(timing, peaks[name], self._launches(case, mode, name, tasks[name]))
            rows.append(row_of(self.record.run, case, name, mode, "ok", verdicts[name], measured))
            say(f"  {mode:17} {name:18} {_times_in_words(measured)}  error {verdicts[name].error:.1e}")
        self.record.append(*rows)

    def _launches(self, case: Case, mode: str, name: str, task: Task) -> int | None:
        """Return the number of kernels of a run on a GPU, else None; write the profile if it is wanted."""
        subject = f"{case}, {name} {mode}"
        is_kept = case.popularity == self.profiled and name in PROFILED and subject not in self.record.profiled
        if case.device != "cuda" and not is_kept:
            return None
        profile = self.record.profile("ops", subject, lambda: _kernels_of(task, case.device), is_kept)
        return sum(kernel.launches for kernel in profile) or None if case.device == "cuda" else None

    def _trouble(self, case: Case, name: str, mode: str, error: Exception, verdict: Verdict | None = None) -> None:
        def row(status: str) -> Row:
            return row_of(self.record.run, case, name, mode, status, verdict)

        self.record.failed(f"{case}, {name} {mode}", error, row)


def _task(mode: str, call: Call, leaves: list[torch.Tensor], upstream: torch.Tensor) -> Task:
    def forward(*_: Any) -> torch.Tensor:
        output = call()
        return output[0] if isinstance(output, tuple) else output

    def without_gradients(_: Any) -> torch.Tensor:
        with torch.no_grad():
            return forward()

    def backward(output: torch.Tensor) -> Any:
        return torch.autograd.grad(output, leaves, upstream.to(output.dtype))

    def both(_: Any) -> Any:
        return backward(forward())

    runs: dict[str, Callable[[Any], Any]] = {"forward": without_gradients, "forward+backward": both}
    return Task(backward, prepare=forward) if mode == "backward" else Task(runs[mode])


def _kernels_of(task: Task, device: str) -> list[KernelTime]:
    state = task.prepare()
    synchronize(device)  # the preparation is no part of the run
    return kernels(lambda: task.run(state), device)


def _times_in_words(measured: Measured) -> str:
    timing: Timing = measured.timing
    parts = [f"{timing.median_ms:10.3f} ms"]
    if timing.host_ms is not None and timing.wall_ms is not None:
        waited = "" if timing.queued else " (the device waited for its host)"
        parts.append(f"host {timing.host_ms:7.3f}  wall {timing.wall_ms:7.3f}{waited}")
        parts.append(f"{measured.launches or '?':>4} launches")
    return "  ".join((*parts, f"{measured.peak_bytes / 1e6:10.1f} MB"))
