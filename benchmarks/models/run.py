"""Measure models in turns, round after round; each model is built anew and then freed."""

import argparse
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

from benchmarks.models.build import Variant, build, new_parameters, read_base, set_trained, variants
from benchmarks.models.measure import Measured, measure
from benchmarks.models.points import FILE, SUBJECT, Point, Row, points
from benchmarks.options import chosen_device
from benchmarks.recorded import Recorded, in_words, say, status_of
from benchmarks.timing import release_memory


def run(arguments: argparse.Namespace) -> int:
    """Measure what the command line requests; return 1 if a measurement failed for any reason but too little memory, else 0."""
    device = chosen_device(arguments)
    bases = [read_base(base) for base in arguments.base]
    wanted = [points(arguments, name, device) for name, _ in bases]
    if arguments.no_append:
        for option in ("resume", "profile"):
            if getattr(arguments, option):
                raise SystemExit(f"--{option} is about rows that --no-append does not keep; leave one of them out.")
    results = None if arguments.no_append else arguments.results
    record = Recorded(device, results, FILE, SUBJECT, arguments.resume)
    deadline = None if arguments.budget is None else time.perf_counter() + arguments.budget
    rounds = 1 if arguments.quick else arguments.rounds
    failures = 0
    for (name, config), (main, by_size) in zip(bases, wanted, strict=True):
        bench = _Bench(record, name, variants(config, arguments.methods, arguments.placements), arguments, deadline)
        bench.measure(main, rounds)
        bench.measure(by_size, 1)
        failures += bench.failures
    return 1 if failures else 0


class _Bench:
    """Measurements of all models of one base. No measurement begins after `deadline`, a time of `time.perf_counter`."""

    def __init__(
        self,
        record: Recorded,
        base: str,
        chosen: list[Variant],
        arguments: argparse.Namespace,
        deadline: float | None,
    ):
        self.record, self.base, self.chosen, self.deadline = record, base, chosen, deadline
        self.device, self.profiles = record.device, arguments.profile
        self.dtype = arguments.dtype or ("bfloat16" if record.device == "cuda" else "float32")
        # New, trained and all parameters, by the name of the model.
        self.counts: dict[str, tuple[int, int, int]] = {}
        self.failures = 0
        # Rounds in which a subject was measured, and subjects that failed in any.
        self.rounds: dict[tuple[str, ...], set[int]] = {}
        self.failed: set[tuple[str, ...]] = set()
        for row in record.before:
            self._note(row)

    def measure(self, wanted: list[Point], rounds: int) -> None:
        """Build every model in each round, and measure the points that have no measurement yet."""
        for number in range(1, rounds + 1):
            for variant, own_points in self._without_twins(wanted):
                left = [point for point in own_points if not self._is_settled(self._subject(variant, point), number)]
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

    def _is_settled(self, subject: tuple[str, ...], number: int) -> bool:
        """Return whether a round needs no measurement: the subject was measured in the round, or failed in any."""
        return subject in self.failed or number in self.rounds.get(subject, ())

    def _note(self, row: Mapping[str, Any]) -> None:
        subject = self.record.key(row)
        self.rounds.setdefault(subject, set()).add(int(row["round"]))
        if row["status"] != "ok":
            self.failed.add(subject)

    def _visit(self, variant: Variant, wanted: list[Point], number: int) -> None:
        try:
            model = build(variant, self.dtype, self.device)
            self._count(model, variant)
        except Exception as error:
            for point in wanted:
                self._keep_failure(variant, point, number, error)
            self.record.recover(error)
            return
        for point in wanted:
            if self._is_late():
                say(f"{self.base}: out of time in round {number}, before {variant.name} {point}")
                return
            is_first = self._subject(variant, point) not in self.rounds
            counts_kernels = self.device == "cuda" and point.phase != "train"
            with_profile = is_first and (counts_kernels or self.profiles)
            try:
                measured = measure(model, variant, point, self.device, with_memory=is_first, with_profile=with_profile)
            except Exception as error:
                self._keep_failure(variant, point, number, error)
                self.record.recover(error)
            else:
                self._keep(variant, point, number, measured)

    def _is_late(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def _count(self, model: PreTrainedModel, variant: Variant) -> None:
        if variant.name not in self.counts:
            trained = sum(parameter.numel() for parameter in set_trained(model, variant))
            new = sum(parameter.numel() for parameter in new_parameters(model, variant))
            self.counts[variant.name] = new, trained, sum(parameter.numel() for parameter in model.parameters())

    def _keep(self, variant: Variant, point: Point, number: int, measured: Measured) -> None:
        peak = "" if measured.peak_bytes is None else f"  {measured.peak_bytes / 1e9:7.2f} GB"
        compiling = "" if measured.compile_s is None else f"  compiled in {measured.compile_s:.1f} s"
        say(f"{self.base}  {variant.name:26} {point}: {measured.seconds:.3f} s{peak}{compiling}")
        if self.profiles and measured.kernels:
            subject = f"{self.base} {variant.name} in {self.dtype}, {point}: {measured.profiled}"
            self.record.profile("model", subject, lambda: list(measured.kernels))
        values = {
            "seconds": round(measured.seconds, 5),
            "host_s": _rounded(measured.host_s, 5),
            "device_s": _rounded(measured.device_s, 5),
            "launches": _rounded(measured.launches, 1),
            "tokens_per_s": round(point.tokens / measured.seconds, 2),
            "peak_gb": _rounded(measured.peak_bytes, 3, 1e9),
        }
        self._add(variant, point, number, status="ok", error="", **values)

    def _keep_failure(self, variant: Variant, point: Point, number: int, error: Exception) -> None:
        """Store the row of a failed measurement. Too little memory is a result; any other error counts as a failure."""
        status = status_of(error)
        self.failures += status == "failed"
        say(f"{self.base}  {variant.name:26} {point}: {status}: {in_words(error)}")
        unknown = dict.fromkeys(("seconds", "host_s", "device_s", "launches", "tokens_per_s", "peak_gb"))
        self._add(variant, point, number, status=status, error=in_words(error), **unknown)

    def _add(self, variant: Variant, point: Point, number: int, **values: Any) -> None:
        new, trained, total = self.counts.get(variant.name, (0, 0, 0))
        row = Row(
            **dataclasses.asdict(self.record.run),
            backend=self.device,
            **self._values(variant, point),
            round=number,
            rounds=1,
            new_parameters=new,
            trained_parameters=trained,
            total_parameters=total,
            **values,
        )
        self.record.append(row)
        self._note(dataclasses.asdict(row))

    def _values(self, variant: Variant, point: Point) -> dict[str, Any]:
        model = {"base": self.base, "method": variant.method, "placement": variant.placement, "dtype": self.dtype}
        return {**model, **dataclasses.asdict(point)}

    def _subject(self, variant: Variant, point: Point) -> tuple[str, ...]:
        return self.record.key(self._values(variant, point))


def _rounded(value: float | None, digits: int, unit: float = 1) -> float | None:
    return None if value is None else round(value / unit, digits)
