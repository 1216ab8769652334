"""Measure models in turns, round after round; each model is built anew and then freed."""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from benchmarks.device import chosen_device
from benchmarks.models.build import Variant, build, new_parameters, read_base, set_trained, shrunk, variants
from benchmarks.models.measure import Measured, measure
from benchmarks.models.points import Point, points
from benchmarks.models.results import FILE, Measurements, Row, Subject, subject_of
from benchmarks.recorded import Recorded, in_words, say, status_of
from benchmarks.timing import release_memory


@dataclass(frozen=True)
class _Counts:
    new: int = 0
    trained: int = 0
    total: int = 0


def run(arguments: argparse.Namespace) -> int:
    """Measure what the command line requests; return 1 if a measurement failed for any reason but too little memory, else 0."""
    with chosen_device(arguments) as device:
        return _run(arguments, device)


def _run(arguments: argparse.Namespace, device: str) -> int:
    bases = [read_base(base) for base in arguments.base]
    if arguments.rehearse:
        bases = [(name, shrunk(config)) for name, config in bases]
    wanted = [points(arguments, name, device) for name, _ in bases]
    if arguments.no_append:
        for option in ("resume", "profile"):
            if getattr(arguments, option):
                raise SystemExit(f"--{option} is about rows that --no-append does not keep; leave one of them out.")
    results = None if arguments.no_append else arguments.results
    record = Recorded.begun(device, results, FILE, arguments.resume)
    measurements = Measurements(record)
    if len(measurements):
        say(f"going on with the run of {record.run.date}, which has {len(measurements)} measurements")
    dtype = arguments.dtype or ("bfloat16" if device == "cuda" else "float32")
    deadline = None if arguments.budget is None else time.perf_counter() + arguments.budget
    failures = 0
    for (name, config), (main, by_size) in zip(bases, wanted, strict=True):
        chosen = variants(config, arguments.methods, arguments.placements)
        bench = _Bench(record, measurements, name, chosen, dtype, deadline, arguments.profile)
        bench.measure(main, 1 if arguments.quick or arguments.rehearse else arguments.rounds)
        bench.measure(by_size, 1)
        failures += bench.failures
    return 1 if failures else 0


class _Bench:
    """Measurements of all models of one base.

    Args:
        record: Record of the run.
        measurements: Measurements that the run already has, which are not repeated.
        base: Name of the base.
        chosen: Models to measure.
        dtype: Name of the dtype of their weights.
        deadline: Time of `time.perf_counter` after which no measurement begins; None for no limit.
        profiles: Whether kernels are stored in `profile.csv`.
    """

    def __init__(
        self,
        record: Recorded,
        measurements: Measurements,
        base: str,
        chosen: list[Variant],
        dtype: str,
        deadline: float | None,
        profiles: bool,
    ):
        self.record, self.measurements, self.base, self.chosen = record, measurements, base, chosen
        self.dtype, self.device, self.deadline, self.profiles = dtype, record.device, deadline, profiles
        self.counts: dict[str, _Counts] = {}
        self.failures = 0

    def measure(self, wanted: list[Point], rounds: int) -> None:
        """Build every model in each round, and measure the points that have no measurement yet."""
        for number in range(1, rounds + 1):
            for variant, own_points in self._without_twins(wanted):
                left = [p for p in own_points if not self.measurements.settles(self._subject(variant, p), number)]
                if not left:
                    continue
                if self._is_late():
                    say(f"{self.base}: out of time in round {number}, before {variant.name}")
                    return
                self._visit(variant, left, number)
                release_memory(self.device)

    def _without_twins(self, wanted: list[Point]) -> Iterator[tuple[Variant, list[Point]]]:
        """Yield each model with its points.

        Models that differ only in the positions of layers read and generate alike, so only the first of them is
        measured there.
        """
        first: dict[str, Variant] = {}
        for variant in self.chosen:
            first.setdefault(variant.architecture, variant)
        for variant in self.chosen:
            is_first = first[variant.architecture] is variant
            yield variant, [point for point in wanted if point.phase == "train" or is_first]

    def _visit(self, variant: Variant, wanted: list[Point], number: int) -> None:
        try:
            model = build(variant, self.dtype, self.device)
            self._count(model, variant)
        except Exception as error:
            for point in wanted:
                self.measurements.add(self._failure(variant, point, number, error))
            self.record.recover(error)
            return
        for point in wanted:
            if self._is_late():
                say(f"{self.base}: out of time in round {number}, before {variant.name} {point}")
                return
            try:
                measured = self._measured(model, variant, point)
            except Exception as error:
                self.measurements.add(self._failure(variant, point, number, error))
                self.record.recover(error)
            else:
                self.measurements.add(self._success(variant, point, number, measured))

    def _measured(self, model: PreTrainedModel, variant: Variant, point: Point) -> Measured:
        is_first = self.measurements.is_first(self._subject(variant, point))
        counts_kernels = self.device == "cuda" and point.phase != "train"
        return measure(
            model,
            variant,
            point,
            self.device,
            with_memory=is_first,
            with_profile=is_first and (counts_kernels or self.profiles),
        )

    def _is_late(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def _count(self, model: PreTrainedModel, variant: Variant) -> None:
        if variant.name not in self.counts:
            trained = sum(parameter.numel() for parameter in set_trained(model, variant))
            new = sum(parameter.numel() for parameter in new_parameters(model, variant))
            total = sum(parameter.numel() for parameter in model.parameters())
            self.counts[variant.name] = _Counts(new, trained, total)

    def _success(self, variant: Variant, point: Point, number: int, measured: Measured) -> Row:
        peak = "" if measured.peak_bytes is None else f"  {measured.peak_bytes / 1e9:7.2f} GB"
        compiling = "" if measured.compile_s is None else f"  compiled in {measured.compile_s:.1f} s"
        say(f"{self.base}  {variant.name:26} {point}: {measured.seconds:.3f} s{peak}{compiling}")
        if self.profiles and measured.kernels:
            subject = f"{self.base} {variant.name} in {self.dtype}, {point}: {measured.profiled}"
            self.record.profile("model", subject, lambda: list(measured.kernels))
        return self._row(variant, point, number, measured=measured)

    def _failure(self, variant: Variant, point: Point, number: int, error: Exception) -> Row:
        """Return the row of a failed measurement. Too little memory is a result; any other error counts as a failure."""
        status = status_of(error)
        self.failures += status == "failed"
        say(f"{self.base}  {variant.name:26} {point}: {status}: {in_words(error)}")
        return self._row(variant, point, number, status=status, error=in_words(error))

    def _row(
        self,
        variant: Variant,
        point: Point,
        number: int,
        *,
        measured: Measured | None = None,
        status: str = "ok",
        error: str = "",
    ) -> Row:
        counts = self.counts.get(variant.name, _Counts())
        values: dict[str, Any] = dataclasses.asdict(measured) if measured is not None else {}
        return Row(
            **dataclasses.asdict(self.record.run),
            backend=self.device,
            **self._values(variant, point),
            round=number,
            status=status,
            seconds=_rounded(values.get("seconds"), 5),
            host_s=_rounded(values.get("host_s"), 5),
            device_s=_rounded(values.get("device_s"), 5),
            launches=_rounded(values.get("launches"), 1),
            tokens_per_s=None if measured is None else round(point.tokens / measured.seconds, 2),
            peak_gb=_rounded(values.get("peak_bytes"), 3, 1e9),
            rounds=1,
            new_parameters=counts.new,
            trained_parameters=counts.trained,
            total_parameters=counts.total,
            error=error,
        )

    def _values(self, variant: Variant, point: Point) -> dict[str, Any]:
        model = {"base": self.base, "method": variant.method, "placement": variant.placement, "dtype": self.dtype}
        return {**model, **dataclasses.asdict(point)}

    def _subject(self, variant: Variant, point: Point) -> Subject:
        return subject_of(self._values(variant, point))


def _rounded(value: float | None, digits: int, unit: float = 1) -> float | None:
    return None if value is None else round(value / unit, digits)
