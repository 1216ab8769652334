"""Run the cases: gate, memory, time; a row a provider and mode."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.ops import peers, providers  # noqa: F401 - fill the table
from benchmarks.ops.gate import Expected, Verdict, small_case
from benchmarks.ops.options import DEFAULT_DTYPES, DEFAULT_SHAPES, DEFAULT_TOKENS
from benchmarks.ops.registry import (
    OPS,
    PROVIDERS,
    Call,
    Inputs,
    Provider,
    Unavailable,
    make_inputs,
    roofline_microseconds,
)
from benchmarks.ops.shapes import MODES, POPULARITIES, SHAPES, Case
from benchmarks.timing import Task, Timing, interleaved, is_out_of_memory, peak_bytes, release_memory
from benchmarks.tracked import Run, append, this_run
from midus_hf.ops import op_choices

FILE = "ops.csv"


@dataclass(frozen=True)
class Row:
    """One line of the results: a provider, a case and a mode.

    `status` is "ok", "refused" by the gate, "out of memory" or "failed"; only "ok" has times. `peak_mb` is what tensors
    held beyond the inputs, `error` the largest RMS ratio against float64 on the small and on the timed shape.
    """

    date: str
    commit: str
    machine: str
    device: str
    backend: str
    op: str
    provider: str
    mode: str
    shape: str
    tokens: int
    popularity: str
    dtype: str
    status: str
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    runs: int | None
    peak_mb: float | None
    error: float | None
    error_of: str | None
    roofline_us: float | None
    roofline_fraction: float | None
    torch: str
    triton: str
    transformers: str


def run(arguments: argparse.Namespace) -> int:
    """Measure what the command line asks for; returns 1 if a provider was wrong or failed."""
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = list(_cases(arguments, device))
    this = this_run(device)
    tracked = not arguments.no_append and arguments.backend == "auto"
    began = time.perf_counter()
    bench = _Bench(
        this, arguments.results / FILE if tracked else None, arguments.providers, arguments.modes, arguments.seconds
    )
    with op_choices(backend=arguments.backend):
        for number, case in enumerate(cases):
            if arguments.budget is not None and time.perf_counter() - began > arguments.budget:
                _say(f"out of time; not measured: {', '.join(map(str, cases[number:]))}")
                break
            bench.measure(case)
            release_memory(device)
    for trouble in bench.troubles:
        _say(f"FAILED {trouble}")
    return 1 if bench.troubles else 0


def _cases(arguments: argparse.Namespace, device: str) -> Iterator[Case]:
    """All combinations, the ops that matter most and the many tokens first."""
    ops = _known(arguments.ops or list(OPS), OPS, "op")
    shapes = _known(arguments.shapes or DEFAULT_SHAPES[device], SHAPES, "shape")
    popularities = _known(arguments.popularity, POPULARITIES, "popularity")
    _known(arguments.modes, MODES, "mode")
    _known(arguments.providers or [], {name for op in ops for name in PROVIDERS[op]}, "provider")
    dtype = arguments.dtype or DEFAULT_DTYPES[device]
    for op in ops:
        for tokens in arguments.tokens or DEFAULT_TOKENS[device]:
            for shape in shapes:
                for popularity in popularities if tokens > 1 else popularities[:1]:
                    yield Case(op, SHAPES[shape], tokens, popularity, dtype, device)


def _known(names: list[str], known: Any, what: str) -> list[str]:
    for name in names:
        if name not in known:
            raise SystemExit(f"{what} is {name!r}; expected one of {', '.join(known)}.")
    return names


class _Bench:
    """One run of the benchmark.

    Args:
        this: What its rows share.
        results: The CSV; None to leave it alone.
        only: Providers to measure; None for all.
        modes: Modes to measure.
        seconds: Of timing, a case and mode.
    """

    def __init__(self, this: Run, results: Path | None, only: list[str] | None, modes: list[str], seconds: float):
        self.this, self.results, self.only, self.modes, self.seconds = this, results, only, modes, seconds
        self.troubles: list[str] = []

    def measure(self, case: Case) -> None:
        """Judge every provider on the small and the timed shape, and time those that are right."""
        _say(str(case))
        chosen = [p for name, p in PROVIDERS[case.op].items() if self.only is None or name in self.only]
        worst: dict[str, Verdict] = {}
        for gated in dict.fromkeys((small_case(case), case)):
            inputs = make_inputs(gated)
            expected = Expected(gated, inputs)
            calls: dict[str, tuple[Provider, Call]] = {}
            for provider in chosen:
                call = self._judged(gated, case, provider, inputs, expected, worst)
                if call is not None:
                    calls[provider.name] = (provider, call)
            chosen = [provider for provider, _ in calls.values()]
        upstream = expected.upstream
        del expected
        release_memory(case.device)
        for mode in self.modes if case.tokens > 1 else ("forward",):  # one token is generated, not trained on
            able = {name: call for name, (provider, call) in calls.items() if mode in provider.modes}
            self._time(case, mode, able, inputs, upstream, worst)

    def _judged(
        self,
        gated: Case,
        case: Case,
        provider: Provider,
        inputs: Inputs,
        expected: Expected,
        worst: dict[str, Verdict],
    ) -> Call | None:
        """The provider's call if it is right, else None; keeps its largest error in `worst`."""
        try:
            call = provider.build(gated, inputs)
            verdict = expected.judge(provider, call, inputs)
        except Unavailable as reason:
            _say(f"  {provider.name}: not measured, {reason}")
            return None
        except Exception as error:
            self._trouble(case, provider.name, "", error)
            return None
        if not verdict.passes:
            message = (
                f"{case}, {provider.name}: {verdict.error_of} differs from float64 by {verdict.error:.2e} (RMS ratio, "
                f"{gated.tokens} tokens); at most {verdict.tolerance:.0e} is right. It is not timed."
            )
            self.troubles.append(message)
            _say(f"  {message}")
            self._append(self._row(case, provider.name, "", "refused", verdict))
            return None
        if provider.name not in worst or verdict.error > worst[provider.name].error:
            worst[provider.name] = verdict
        return call

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
        for name, timing in interleaved(tasks, case.device, seconds=self.seconds).items():
            rows.append(self._row(case, name, mode, "ok", verdicts[name], timing, peaks[name]))
            _say(
                f"  {mode:17} {name:18} {timing.median_ms:10.3f} ms  {peaks[name] / 1e6:10.1f} MB  error {verdicts[name].error:.1e}"
            )
        self._append(*rows)

    def _trouble(self, case: Case, name: str, mode: str, error: Exception, verdict: Verdict | None = None) -> None:
        """Record what could not run: too little memory is a finding, anything else a failure."""
        full = is_out_of_memory(error)
        if full:
            _say(f"  {mode} {name}: out of memory")
        else:
            first_line = (str(error).splitlines() or [""])[0]
            self.troubles.append(f"{case}, {name} {mode}: {type(error).__name__}: {first_line}")
            _say(f"  {self.troubles[-1]}")
        self._append(self._row(case, name, mode, "out of memory" if full else "failed", verdict))
        error.__traceback__ = None  # it holds the tensors of the frames it went through
        release_memory(case.device)

    def _row(
        self,
        case: Case,
        name: str,
        mode: str,
        status: str,
        verdict: Verdict | None = None,
        timing: Timing | None = None,
        peak: int | None = None,
    ) -> Row:
        least = roofline_microseconds(case, mode, self.this.device) if timing is not None else None
        return Row(
            **dataclasses.asdict(self.this),
            backend=case.device,
            op=case.op,
            provider=name,
            mode=mode,
            shape=case.shape.name,
            tokens=case.tokens,
            popularity=case.popularity,
            dtype=case.dtype,
            status=status,
            median_ms=None if timing is None else round(timing.median_ms, 4),
            p20_ms=None if timing is None else round(timing.p20_ms, 4),
            p80_ms=None if timing is None else round(timing.p80_ms, 4),
            runs=None if timing is None else timing.runs,
            peak_mb=None if peak is None else round(peak / 1e6, 2),
            error=None if verdict is None else float(f"{verdict.error:.3g}"),
            error_of=None if verdict is None else verdict.error_of,
            roofline_us=None if least is None else round(least, 2),
            roofline_fraction=None if least is None or timing is None else round(least / 1e3 / timing.median_ms, 4),
        )

    def _append(self, *rows: Row) -> None:
        if self.results is not None:
            append(rows, self.results)


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


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
