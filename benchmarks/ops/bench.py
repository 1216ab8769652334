"""Measure ops: correctness, memory, time and kernels; one row per provider and mode."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.ops import providers  # noqa: F401 - fills the table
from benchmarks.ops.gate import Expected, Verdict, small_case
from benchmarks.ops.operations import (
    OPS,
    PROVIDERS,
    Call,
    Inputs,
    Provider,
    Unavailable,
    make_inputs,
    roofline_microseconds,
)
from benchmarks.ops.shapes import COMPILED, MODES, OURS, POPULARITIES, SHAPES, Case
from benchmarks.options import chosen_device
from benchmarks.recorded import Recorded, require_known, say
from benchmarks.timing import KernelTime, Task, Timing, kernels, peak_bytes, release_memory, synchronize
from benchmarks.tracked import Run
from midus_hf.ops import op_choices

FILE = "ops.csv"
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"shapes": ["smollm2-135m"], "tokens": [4096, 1], "popularity": list(POPULARITIES)},
    "cuda": {"shapes": ["llama-3.2-1b", "llama-3.1-8b"], "tokens": [32768, 1], "popularity": list(POPULARITIES)},
}
DTYPES = ("float32", "bfloat16", "float16")
# Providers whose kernels are profiled: the choice of the ops themselves, and the providers that it should beat.
PROFILED = (OURS, "kept-values", *COMPILED)
IDENTITY = ("op", "shape", "tokens", "popularity", "dtype", "provider", "mode")


@dataclass(frozen=True)
class Row(Run):
    """One line of the results: a provider, a case and a mode.

    `status` is "ok", "refused" by the gate, "out of memory" or "failed"; only "ok" has times. `median_ms`, `p20_ms` and
    `p80_ms` are the device's time on a GPU, and wall time on a CPU. Three columns are filled on a GPU only: `host_ms`,
    the median time until a call has been issued; `wall_ms`, the median time from an idle device to the end; and
    `launches`, the number of kernels of a run. `peak_mb` is the memory that tensors held beyond the inputs, and `error`
    the largest RMS ratio against float64 on the small and on the timed shape.
    """

    backend: str
    op: str
    provider: str
    mode: str
    shape: str
    tokens: int
    popularity: str
    dtype: str
    status: str
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    host_ms: float | None = None
    wall_ms: float | None = None
    runs: int | None = None
    launches: int | None = None
    peak_mb: float | None = None
    error: float | None = None
    error_of: str | None = None
    roofline_us: float | None = None
    roofline_fraction: float | None = None


def run(arguments: argparse.Namespace) -> int:
    """Measure the cases of the command line, and return 1 if a provider was wrong or failed."""
    device = chosen_device(arguments)
    for name, values in DEFAULTS[device].items():
        setattr(arguments, name, getattr(arguments, name) or values)
    arguments.dtype = arguments.dtype or ["bfloat16" if device == "cuda" else "float32"]
    cases = list(_cases(arguments, device))
    bench = _bench(arguments, device)
    with op_choices(**({} if arguments.backend == "auto" else {"backend": arguments.backend})):
        return bench.record.measure_all(cases, bench.measure, arguments.budget)


def _bench(arguments: argparse.Namespace, device: str) -> "Bench":
    """Return the bench of a new run, or with `--resume` of the newest run like it, with that run's rows and failures."""
    is_kept = not arguments.no_append and arguments.backend == "auto"
    for name in ("resume", "profile"):
        if getattr(arguments, name) and not is_kept:
            raise SystemExit(f"--{name} needs rows that are kept; leave out --no-append and --backend.")
    record = Recorded(device, arguments.results if is_kept else None, FILE, IDENTITY, arguments.resume)
    profiled = arguments.popularity[0] if arguments.profile else None
    return Bench(record, arguments.providers, arguments.modes, arguments.seconds, profiled)


def _cases(arguments: argparse.Namespace, device: str) -> Iterator[Case]:
    """Yield all combinations, in the order of the ops and with many tokens first."""
    ops = arguments.ops or list(OPS)
    require_known(ops, OPS, "op")
    require_known(arguments.shapes, SHAPES, "shape")
    require_known(arguments.popularity, POPULARITIES, "popularity")
    require_known(arguments.dtype, DTYPES, "dtype")
    require_known(arguments.modes, MODES, "mode")
    require_known(arguments.providers, {name for op in ops for name in PROVIDERS[op]}, "provider")
    popularities = arguments.popularity
    for op in ops:
        for tokens in arguments.tokens:
            for shape in arguments.shapes:
                for popularity in popularities if tokens > 1 else popularities[:1]:
                    for dtype in arguments.dtype:
                        yield Case(op, SHAPES[shape], tokens, popularity, dtype, device)


class Bench:
    """One run of the benchmark, of the providers `only`, with profiles of the cases of one popularity, or without."""

    def __init__(
        self, record: Recorded, only: list[str] | None, modes: list[str], seconds: float, profiled: str | None = None
    ):
        self.record, self.only, self.modes, self.seconds, self.profiled = record, only, modes, seconds, profiled

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
            chosen = [one for one in chosen if one.name in calls]
            chosen = [one for one in chosen if self._is_right(case, one, calls[one.name], inputs, expected, worst)]
        upstream = expected.upstream
        del expected
        release_memory(case.device)
        for mode in dict.fromkeys(mode for modes in wanted.values() for mode in modes):
            able = {provider.name: calls[provider.name] for provider in chosen if mode in wanted[provider.name]}
            self._time(case, mode, able, inputs, upstream, worst)

    def _wanted(self, case: Case) -> dict[str, list[str]]:
        """Return the modes that are left to measure, per provider that has any left."""
        modes = self.modes if case.tokens > 1 else ["forward"]  # one token is generated, not trained on

        def is_left(name: str, mode: str) -> bool:
            return self.record.key(_values(case, name, mode)) not in self.record.measured

        wanted = {
            name: [mode for mode in modes if mode in provider.modes and is_left(name, mode)]
            for name, provider in PROVIDERS[case.op].items()
            if (self.only is None or name in self.only) and is_left(name, "")
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
                self._failed(case, provider.name, "", error)
        return calls

    def _is_right(
        self,
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
            self._failed(case, provider.name, "", error)
            return False
        if not verdict.passes:
            self.record.trouble(
                f"{case}, {provider.name}: {verdict.error_of} differs from float64 by {verdict.error:.2e} (RMS ratio, "
                f"{expected.case.tokens} tokens); at most {verdict.tolerance:.0e} is right. It is not timed."
            )
            self.record.append(self._row(case, provider.name, "", "refused", verdict))
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
        def failed(name: str, error: Exception) -> None:
            self._failed(case, name, mode, error, verdicts[name])

        tasks, peaks = {}, {}
        for name, call in calls.items():
            task = _task(mode, call, [inputs[leaf] for leaf in OPS[case.op].leaves], upstream)
            try:
                task.run(task.prepare())  # compiles and fills caches, which are no part of the peak
                peaks[name] = peak_bytes(lambda task=task: task.run(task.prepare()), case.device)
            except Exception as error:
                failed(name, error)
                continue
            tasks[name] = task
        rows = []
        for name, timing in self.record.timed(f"  {mode}", tasks, self.seconds, failed).items():
            launches, peak, error = self._launches(case, mode, name, tasks[name]), peaks[name], verdicts[name].error
            rows.append(self._timed_row(case, name, mode, verdicts[name], timing, launches, peak))
            times = _times_in_words(timing, launches)
            say(f"  {mode:17} {name:18} {times}  {peak / 1e6:10.1f} MB  error {error:.1e}")
        self.record.append(*rows)

    def _launches(self, case: Case, mode: str, name: str, task: Task) -> int | None:
        """Return the number of kernels of a run on a GPU, else None; write the profile if it is wanted."""
        subject = f"{case}, {name} {mode}"
        is_kept = case.popularity == self.profiled and name in PROFILED and subject not in self.record.profiled
        if case.device != "cuda" and not is_kept:
            return None
        profile = self.record.profile("ops", subject, lambda: _kernels_of(task, case.device), is_kept)
        return sum(kernel.launches for kernel in profile) or None if case.device == "cuda" else None

    def _failed(self, case: Case, name: str, mode: str, error: Exception, verdict: Verdict | None = None) -> None:
        def row(status: str) -> Row:
            return self._row(case, name, mode, status, verdict)

        self.record.failed(f"{case}, {name} {mode}", error, row)

    def _row(self, case: Case, name: str, mode: str, status: str, verdict: Verdict | None, **measured: Any) -> Row:
        errors = {}
        if verdict is not None:
            errors = {"error": float(f"{verdict.error:.3g}"), "error_of": verdict.error_of}
        run, values = dataclasses.asdict(self.record.run), _values(case, name, mode)
        return Row(**run, backend=case.device, **values, status=status, **errors, **measured)

    def _timed_row(
        self, case: Case, name: str, mode: str, verdict: Verdict, timing: Timing, launches: int | None, peak: int
    ) -> Row:
        measured: dict[str, Any] = {"runs": timing.runs, "launches": launches, "peak_mb": round(peak / 1e6, 2)}
        for column in ("median_ms", "p20_ms", "p80_ms", "host_ms", "wall_ms"):
            milliseconds = getattr(timing, column)
            measured[column] = None if milliseconds is None else round(milliseconds, 4)
        least = roofline_microseconds(case, mode, self.record.run.device)
        if least is not None:
            measured["roofline_us"] = round(least, 2)
            measured["roofline_fraction"] = round(least / 1e3 / timing.median_ms, 4)
        return self._row(case, name, mode, "ok", verdict, **measured)


def _values(case: Case, provider: str, mode: str) -> dict[str, Any]:
    """Return the columns `IDENTITY` of a row, which name what the row measures."""
    values = {name: getattr(case, name) for name in ("op", "tokens", "popularity", "dtype")}
    return {**values, "shape": case.shape.name, "provider": provider, "mode": mode}


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


def _times_in_words(timing: Timing, launches: int | None) -> str:
    text = f"{timing.median_ms:10.3f} ms"
    if timing.host_ms is None or timing.wall_ms is None:
        return text
    waited = "" if timing.queued else " (the device waited for its host)"
    return f"{text}  host {timing.host_ms:7.3f}  wall {timing.wall_ms:7.3f}{waited}  {launches or '?':>4} launches"
