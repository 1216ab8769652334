"""Rows of model.csv, one per measurement, and the measurements that a run already has."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.tracked import Run

if TYPE_CHECKING:  # reports import this module for its columns, and must run without PyTorch
    from benchmarks.recorded import Recorded

FILE = "model.csv"
# Columns that identify what is measured once per round.
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


@dataclass(frozen=True)
class Row(Run):
    """Row of `model.csv`: a model at one point, measured once.

    Args:
        round: Number of the round, from 1.
        status: `"ok"`, `"out of memory"` or `"failed"`; only `"ok"` has times.
        seconds: Wall time of an optimizer step, a generation or a prefill, until the device was done.
        host_s: Wall time until all work was issued; on a GPU only.
        device_s: Time that kernels kept the GPU busy, extrapolated from a few tokens or measured in one prefill. Only a
            run's first measurement has it, and training never.
        launches: Kernels per generated token or per prefill, counted in the same profile.
        tokens_per_s: Tokens of all sequences per second.
        peak_gb: Peak of the memory of tensors in GB, weights included. On a CPU only a run's first measurement has it.
        rounds: Rounds that the row stands for: 1, except in old rows, which are medians over rounds.
        error: The error's type and first line; empty if the status is `"ok"`.
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
    """Return the subject of a row: its values in the columns of `SUBJECT`, as text."""
    return tuple(str(values[name]) for name in SUBJECT)


class Measurements:
    """Measurements of a run, each stored as soon as it is made.

    Args:
        record: Record of the run. Rows that it already has count as measured.
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
        """Return whether a round needs no measurement: the subject was measured in it, or failed in any round."""
        return subject in self._failed or number in self._rounds.get(subject, ())

    def is_first(self, subject: Subject) -> bool:
        """Return whether the subject was never measured."""
        return subject not in self._rounds

    def add(self, row: Row) -> None:
        """Store a measurement."""
        self._record.append(row)
        self._note(dataclasses.asdict(row))

    def _note(self, row: Mapping[str, Any]) -> None:
        subject = subject_of(row)
        self._rounds.setdefault(subject, set()).add(int(row["round"]))
        if row["status"] != "ok":
            self._failed.add(subject)
