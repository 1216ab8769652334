"""Measure one case: gate, memory, time, kernels; a row a provider and mode."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import require_working
from benchmarks.ops.gate import Expected, Verdict, small_case
from benchmarks.ops.names import COMPILED, OURS
from benchmarks.ops.registry import OPS, PROVIDERS, Call, Inputs, Provider, Unavailable, make_inputs
from benchmarks.ops.row import FILE, Key, Measured, Row, key, row_of
from benchmarks.ops.shapes import Case
from benchmarks.profile import KernelTime, kernels, write_profile
from benchmarks.timing import Task, Timing, interleaved, is_out_of_memory, peak_bytes, release_memory, synchronize
from benchmarks.tracked import Run, append

PROFILED = (OURS, "exact", "one-block", "kept-values", *COMPILED)
"""Providers whose kernels are written down: what ops choose by themselves, and what they are to be faster than."""


class Bench:
    """One run of the benchmark.

    Args:
        this: What its rows share.
        results: Folder of the CSV; None to leave it alone.
        only: Providers to measure; None for all.
        modes: Modes to measure.
        seconds: Of timing, a case and mode.
        profiled: The popularity whose cases are profiled. Default: none.
        there: What the rows that the run has already are about. Default: none.
        profiled_before: Subjects of the profiles that it has already. Default: none.
    """

    def __init__(
        self,
        this: Run,
        results: Path | None,
        only: list[str] | None,
        modes: list[str],
        seconds: float,
        profiled: str | None = None,
        there: frozenset[Key] = frozenset(),
        profiled_before: frozenset[str] = frozenset(),
    ):
        self.this, self.results, self.only, self.modes, self.seconds = this, results, only, modes, seconds
        self.profiled, self.there, self.profiled_before = profiled, there, profiled_before
        self.troubles: list[str] = []

    def measure(self, case: Case) -> None:
        """Judge every provider on the small and the timed shape, and time those that are right."""
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
        """Modes to measure of each provider that has any left."""
        modes = self.modes if case.tokens > 1 else ["forward"]  # one token is generated, not trained on
        wanted = {
            name: [mode for mode in modes if mode in provider.modes and key(case, name, mode) not in self.there]
            for name, provider in PROVIDERS[case.op].items()
            if (self.only is None or name in self.only) and key(case, name, "") not in self.there
        }
        return {name: left for name, left in wanted.items() if left}

    def _built(self, gated: Case, case: Case, chosen: list[Provider], inputs: Inputs) -> dict[str, Call]:
        """The calls of providers that can run here."""
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
        """Whether the gate lets the provider pass; keeps its largest error in `worst`."""
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
            self.troubles.append(message)
            say(f"  {message}")
            self._append(row_of(self.this, case, provider.name, "", "refused", verdict))
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
                task.run(task.prepare())  # what is compiled or cached once is no part of the peak
                peaks[name] = peak_bytes(lambda task=task: task.run(task.prepare()), case.device)
            except Exception as error:
                self._trouble(case, name, mode, error, verdicts[name])
                continue
            tasks[name] = task
        if not tasks:
            return
        rows = []
        for name, timing in self._timings(case, mode, tasks, verdicts).items():
            measured = Measured(timing, peaks[name], self._launches(case, mode, name, tasks[name]))
            rows.append(row_of(self.this, case, name, mode, "ok", verdicts[name], measured))
            say(f"  {mode:17} {name:18} {_told(measured)}  error {verdicts[name].error:.1e}")
        self._append(*rows)

    def _timings(
        self, case: Case, mode: str, tasks: dict[str, Task], verdicts: dict[str, Verdict]
    ) -> dict[str, Timing]:
        """Times of all tasks in turn; where one of them fails, as what just fitted into memory may, of each by itself."""
        try:
            return interleaved(tasks, case.device, seconds=self.seconds)
        except Exception as error:
            say(f"  {mode}: each is timed by itself, after {type(error).__name__}: {_first_line(error)}")
        timings: dict[str, Timing] = {}
        for name, task in tasks.items():
            release_memory(case.device)
            try:
                timings |= interleaved({name: task}, case.device, seconds=self.seconds / len(tasks))
            except Exception as error:
                self._trouble(case, name, mode, error, verdicts[name])
        return timings

    def _launches(self, case: Case, mode: str, name: str, task: Task) -> int | None:
        """Kernels of a run, on a GPU; writes the profile down where it was asked for."""
        subject = f"{case}, {name} {mode}"
        written = case.popularity == self.profiled and name in PROFILED and subject not in self.profiled_before
        if case.device != "cuda" and not written:
            return None
        try:
            found = _kernels_of(task, case.device)
        except Exception as error:  # the times are good without it
            say(f"  {mode} {name}: no profile, {type(error).__name__}: {_first_line(error)}")
            return None
        if written and self.results is not None:
            write_profile(self.this, self.results, "ops", subject, found)
        return sum(kernel.launches for kernel in found) or None if case.device == "cuda" else None

    def _trouble(self, case: Case, name: str, mode: str, error: Exception, verdict: Verdict | None = None) -> None:
        """Record what could not run: too little memory is a finding, anything else a failure."""
        full = is_out_of_memory(error)
        if full:
            say(f"  {mode} {name}: out of memory")
        else:
            self.troubles.append(f"{case}, {name} {mode}: {type(error).__name__}: {_first_line(error)}")
            say(f"  {self.troubles[-1]}")
        self._append(row_of(self.this, case, name, mode, "out of memory" if full else "failed", verdict))
        error.__traceback__ = None  # it holds the tensors of the frames it went through
        require_working(case.device)
        release_memory(case.device)

    def _append(self, *rows: Row) -> None:
        if self.results is not None:
            append(rows, self.results / FILE)


def say(message: str) -> None:
    """Tell whoever watches."""
    print(message, file=sys.stderr, flush=True)


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
    synchronize(device)  # what prepares the run is no part of it
    return kernels(lambda: task.run(state), device)


def _told(measured: Measured) -> str:
    timing: Timing = measured.timing
    parts = [f"{timing.median_ms:10.3f} ms"]
    if timing.host_ms is not None and timing.wall_ms is not None:
        waited = "" if timing.queued else " (the device waited for its host)"
        parts.append(f"host {timing.host_ms:7.3f}  wall {timing.wall_ms:7.3f}{waited}")
        parts.append(f"{measured.launches or '?':>4} launches")
    return "  ".join((*parts, f"{measured.peak_bytes / 1e6:10.1f} MB"))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
