"""Rows of model.csv, a measurement each, and what a run has measured already."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models.names import SUBJECT
from benchmarks.tracked import Run, append, rows_of

FILE = "model.csv"


@dataclass(frozen=True)
class Row:
    """One line of the results: a model at one point, measured once.

    Args:
        round: Which visit of the model it was, from 1.
        status: `"ok"`, `"out of memory"` or `"failed"`; only `"ok"` has times.
        seconds: Of an optimizer step, of one generation or of one prefill, by the clock, until the device was done.
        host_s: Until everything was issued; of a GPU alone.
        device_s: That kernels kept the GPU busy, of a run's first measurement: counted from a few tokens, or from one
            prefill; not known of training.
        launches: Kernels a generated token, or a prefill, counted likewise.
        tokens_per_s: Tokens of all sequences.
        peak_gb: What tensors held at most, weights included; on a CPU of a run's first measurement alone.
        rounds: Rounds that the row stands for. Always 1, but in rows from before each round had its own, which are
            medians.
        error: The first line of what went wrong.
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
    round: int
    status: str
    seconds: float | None
    host_s: float | None
    device_s: float | None
    launches: float | None
    tokens_per_s: float | None
    peak_gb: float | None
    rounds: int
    new_parameters: int
    trained_parameters: int
    total_parameters: int
    error: str
    torch: str
    triton: str
    transformers: str


Subject = tuple[str, ...]


def subject_of(values: Mapping[str, Any]) -> Subject:
    """What a row, or its values, is about."""
    return tuple(str(values[name]) for name in SUBJECT)


class Measurements:
    """What a run has measured, in a CSV that has each measurement as soon as it is made.

    Args:
        results: The CSV; None to keep none.
        resumed: A run whose rows in the CSV count; None for one that begins.
    """

    def __init__(self, results: Path | None, resumed: Run | None):
        self._results = results
        self._rounds: dict[Subject, set[int]] = {}
        self._failed: set[Subject] = set()
        for row in rows_of(resumed, results) if results is not None and resumed is not None else []:
            self._note(row)

    def __len__(self) -> int:
        return sum(map(len, self._rounds.values()))

    def settles(self, subject: Subject, number: int) -> bool:
        """Whether there is nothing to measure in this round: it was, or an earlier round had no success."""
        return subject in self._failed or number in self._rounds.get(subject, ())

    def is_first(self, subject: Subject) -> bool:
        """Whether nothing is known of it."""
        return subject not in self._rounds

    def add(self, row: Row) -> None:
        """Keep a measurement."""
        if self._results is not None:
            append([row], self._results)
        self._note(dataclasses.asdict(row))

    def _note(self, row: Mapping[str, Any]) -> None:
        subject = subject_of(row)
        self._rounds.setdefault(subject, set()).add(int(row["round"]))
        if row["status"] != "ok":
            self._failed.add(subject)
