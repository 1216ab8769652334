"""Rows of model.csv, a measurement each, and what a run has measured already."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.tracked import Run

if TYPE_CHECKING:  # reports, which know rows by these columns, do without PyTorch
    from benchmarks.recorded import Recorded

FILE = "model.csv"
SUBJECT = (
    "base",
    "method",
    "placement",
    "dtype",
    "phase",
    "decoding",
    "batch",
    "accumulation",
    "length",
    "new_tokens",
)
"""What is measured once a round, by its columns."""


@dataclass(frozen=True)
class Row(Run):
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


Subject = tuple[str, ...]


def subject_of(values: Mapping[str, Any]) -> Subject:
    """What a row, or its values, is about."""
    return tuple(str(values[name]) for name in SUBJECT)


class Measurements:
    """What a run has measured, of which each measurement is kept as soon as it is made.

    Args:
        record: Of the run; what it has already counts.
    """

    def __init__(self, record: "Recorded"):
        self._record = record
        self._rounds: dict[Subject, set[int]] = {}
        self._failed: set[Subject] = set()
        for row in record.before:
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
        self._record.append(row)
        self._note(dataclasses.asdict(row))

    def _note(self, row: Mapping[str, Any]) -> None:
        subject = subject_of(row)
        self._rounds.setdefault(subject, set()).add(int(row["round"]))
        if row["status"] != "ok":
            self._failed.add(subject)
