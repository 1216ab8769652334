"""Measure models in turn, round after round, each built anew and freed again."""

import argparse
import dataclasses
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.models.build import Variant, build, parameters_in, read_base, set_trained, variants
from benchmarks.models.measure import Measured, Point, measure
from benchmarks.models.options import PHASES
from benchmarks.timing import is_out_of_memory, percentile, release_memory
from benchmarks.tracked import Run, append, this_run

FILE = "model.csv"


@dataclass(frozen=True)
class Row:
    """One line of the results: a model at one point.

    Times are of an optimizer step, of one generation or of one prefill, medians over the rounds. `status` is "ok", "out
    of memory" or "failed"; only "ok" has times. `peak_gb` counts tensors, weights included.
    """

    date: str
    commit: str
    machine: str
    device: str
    backend: str
    base: str
    method: str
    placement: str
    phase: str
    decoding: str
    batch: int
    accumulation: int
    length: int
    new_tokens: int
    dtype: str
    status: str
    median_s: float | None
    p20_s: float | None
    p80_s: float | None
    rounds: int
    tokens_per_s: float | None
    peak_gb: float | None
    new_parameters: int
    trained_parameters: int
    total_parameters: int
    torch: str
    triton: str
    transformers: str


@dataclass
class _Findings:
    """What is known of one model at one point."""

    seconds: list[float] = field(default_factory=list)
    peak: int | None = None
    status: str = "ok"


@dataclass(frozen=True)
class _Counts:
    new: int
    trained: int
    total: int


def run(arguments: argparse.Namespace) -> int:
    """Measure what the command line asks for; returns 1 if something failed for want of anything but memory."""
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    for phase in arguments.phases:
        if phase not in PHASES:
            raise SystemExit(f"phase is {phase!r}; expected one of {', '.join(PHASES)}.")
    this = this_run(device)
    results = None if arguments.no_append else arguments.results / FILE
    dtype = arguments.dtype or ("bfloat16" if device == "cuda" else "float32")
    deadline = None if arguments.budget is None else time.perf_counter() + arguments.budget
    failures = 0
    for base in arguments.base:
        name, config = read_base(base)
        chosen = variants(config, arguments.methods, arguments.placements)
        bench = _Bench(this, results, name, chosen, dtype, device, deadline)
        main, by_size = _points(arguments, name, device)
        bench.measure(main, 1 if arguments.quick else arguments.rounds)
        bench.measure(by_size, 1)
        bench.finish()
        failures += bench.failures
    return 1 if failures else 0


def _points(arguments: argparse.Namespace, base: str, device: str) -> tuple[list[Point], list[Point]]:
    """The main points, measured in every round, and those by size, measured once."""
    gpu = device == "cuda"
    accumulation = arguments.accumulation or (16 if gpu else 2)
    batch = arguments.batch or ((64 if "1b" in base.lower() else 16) if gpu else 4)
    length = arguments.length or (2048 if gpu else 64)
    prompt, new_tokens = arguments.prompt or (128 if gpu else 32), arguments.new_tokens or (128 if gpu else 32)
    decodings = arguments.decoding or (["eager", "graph"] if gpu else ["eager"])
    prompts = arguments.prompts or ([512, 2048, 8192] if gpu else [64, 256])
    if arguments.quick:
        accumulation, batch, length, prompt, new_tokens, prompts = 2, 2, 16, 4, 4, [8]
    for size in (batch, *(arguments.batches or [])):
        if size % accumulation:
            raise SystemExit(f"batch is {size}; expected a multiple of accumulation = {accumulation}.")
    main = [Point("generate", 1, 1, prompt, new_tokens, decoding) for decoding in decodings]
    main += [Point("train", batch, accumulation, length)]
    main += [Point("prefill", rows, 1, tokens) for rows in arguments.prefill_batches for tokens in prompts]
    by_size = [Point("train", size, accumulation, length) for size in arguments.batches or []]
    by_size += [Point("train", batch, accumulation, tokens) for tokens in arguments.lengths or []]
    by_size = [point for point in dict.fromkeys(by_size) if point not in main]
    wanted = arguments.phases
    return [point for point in main if point.phase in wanted], [point for point in by_size if point.phase in wanted]


class _Bench:
    """All models of one base.

    Args:
        this: What its rows share.
        results: The CSV; None to leave it alone.
        base: Name.
        chosen: The models.
        dtype: Of their weights.
        device: `"cpu"` or `"cuda"`.
        deadline: By `time.perf_counter`, after which no model is begun; None for never.
    """

    def __init__(
        self,
        this: Run,
        results: Path | None,
        base: str,
        chosen: list[Variant],
        dtype: str,
        device: str,
        deadline: float | None,
    ):
        self.this, self.results, self.base, self.chosen = this, results, base, chosen
        self.dtype, self.device, self.deadline = dtype, device, deadline
        self.findings: dict[tuple[str, Point], _Findings] = {}
        self.counts: dict[str, _Counts] = {}
        self.failures = 0

    def measure(self, points: list[Point], rounds: int) -> None:
        """Visit every model in each round, measuring the points in turn."""
        wanted = self._without_twins(points)
        for number in range(rounds):
            for variant, own_points in wanted:
                if self.deadline is not None and time.perf_counter() > self.deadline:
                    _say(f"{self.base}: out of time in round {number + 1}, before {variant.name}")
                    return
                try:
                    self._visit(variant, own_points)
                except Exception as error:
                    for point in own_points:
                        self._trouble(variant, point, error)
                release_memory(self.device)

    def _without_twins(self, points: list[Point]) -> list[tuple[Variant, list[Point]]]:
        """The points of each model; where nothing trains, of the first of those that differ only in where layers stand."""
        first: dict[str, Variant] = {}
        for variant in self.chosen:
            first.setdefault(variant.architecture, variant)
        wanted = [
            (
                variant,
                [point for point in points if point.phase == "train" or first[variant.architecture] is variant],
            )
            for variant in self.chosen
        ]
        return [(variant, own_points) for variant, own_points in wanted if own_points]

    def _visit(self, variant: Variant, points: list[Point]) -> None:
        model = build(variant, self.dtype, self.device)
        if variant.name not in self.counts:
            trained = sum(parameter.numel() for parameter in set_trained(model, variant))
            total = sum(parameter.numel() for parameter in model.parameters())
            self.counts[variant.name] = _Counts(parameters_in(model, variant.new_layers), trained, total)
        for point in points:
            found = self.findings.setdefault((variant.name, point), _Findings())
            if found.status != "ok":
                continue
            try:
                self._note(variant, point, measure(model, variant, point, self.device, found.peak is None))
            except Exception as error:
                self._trouble(variant, point, error)

    def _note(self, variant: Variant, point: Point, measured: Measured) -> None:
        found = self.findings[variant.name, point]
        found.seconds.append(measured.seconds)
        found.peak = max(filter(None, (found.peak, measured.peak_bytes)), default=None)
        peak = "" if found.peak is None else f"  {found.peak / 1e9:7.2f} GB"
        _say(f"{self.base}  {variant.name:26} {point}: {measured.seconds:.3f} s{peak}")

    def _trouble(self, variant: Variant, point: Point, error: Exception) -> None:
        """Too little memory is a finding, anything else a failure."""
        full = is_out_of_memory(error)
        found = self.findings.setdefault((variant.name, point), _Findings())
        found.status = "out of memory" if full else "failed"
        first_line = (str(error).splitlines() or [""])[0]
        self.failures += not full
        _say(f"{self.base}  {variant.name:26} {point}: {found.status}: {type(error).__name__}: {first_line}")
        error.__traceback__ = None  # it holds the tensors of the frames it went through
        release_memory(self.device)

    def finish(self) -> None:
        """Append the rows, a model and point each."""
        by_name = {variant.name: variant for variant in self.chosen}
        rows = [
            self._row(by_name[name], point, found)
            for (name, point), found in self.findings.items()
            if found.seconds or found.status != "ok"
        ]
        if self.results is not None:
            append(rows, self.results)

    def _row(self, variant: Variant, point: Point, found: _Findings) -> Row:
        ordered = sorted(found.seconds) if found.status == "ok" else []
        median = statistics.median(ordered) if ordered else None
        counts = self.counts.get(variant.name, _Counts(0, 0, 0))
        return Row(
            **dataclasses.asdict(self.this),
            backend=self.device,
            base=self.base,
            method=variant.method,
            placement=variant.placement,
            **dataclasses.asdict(point),
            dtype=self.dtype,
            status=found.status,
            median_s=None if median is None else round(median, 5),
            p20_s=round(percentile(ordered, 20), 5) if ordered else None,
            p80_s=round(percentile(ordered, 80), 5) if ordered else None,
            rounds=len(ordered),
            tokens_per_s=None if median is None else round(point.tokens / median, 2),
            peak_gb=None if found.peak is None else round(found.peak / 1e9, 3),
            new_parameters=counts.new,
            trained_parameters=counts.trained,
            total_parameters=counts.total,
        )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
