"""Rows of `ops.csv`."""

import dataclasses
from dataclasses import dataclass

from benchmarks.ops.gate import Verdict
from benchmarks.ops.registry import roofline_microseconds
from benchmarks.ops.shapes import Case
from benchmarks.timing import Timing
from benchmarks.tracked import Run

FILE = "ops.csv"

# Identity of a row: the case as text, the provider and the mode.
Key = tuple[str, ...]


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
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    host_ms: float | None
    wall_ms: float | None
    runs: int | None
    launches: int | None
    peak_mb: float | None
    error: float | None
    error_of: str | None
    roofline_us: float | None
    roofline_fraction: float | None


@dataclass(frozen=True)
class Measured:
    """Measurements of one provider in one mode.

    Args:
        timing: Times of the runs.
        peak_bytes: Most bytes that tensors held beyond the inputs.
        launches: Kernels of a run; None if they were not counted.
    """

    timing: Timing
    peak_bytes: int
    launches: int | None


def row_of(
    this: Run,
    case: Case,
    provider: str,
    mode: str,
    status: str,
    verdict: Verdict | None = None,
    measured: Measured | None = None,
) -> Row:
    """Return a row of the results.

    Args:
        this: The run that the row belongs to.
        case: The measured case.
        provider: Name of the provider.
        mode: One of `MODES`, or empty if the provider ran in no mode.
        status: Status of the row, as in `Row`.
        verdict: Verdict of the gate. Default: None, for a provider that failed before.
        measured: Measurements, with status "ok". Default: None, for any other status.
    """
    timing = None if measured is None else measured.timing
    least = None if timing is None else roofline_microseconds(case, mode, this.device)
    return Row(
        **dataclasses.asdict(this),
        backend=case.device,
        op=case.op,
        provider=provider,
        mode=mode,
        shape=case.shape.name,
        tokens=case.tokens,
        popularity=case.popularity,
        dtype=case.dtype,
        status=status,
        median_ms=_rounded(timing and timing.median_ms),
        p20_ms=_rounded(timing and timing.p20_ms),
        p80_ms=_rounded(timing and timing.p80_ms),
        host_ms=_rounded(timing and timing.host_ms),
        wall_ms=_rounded(timing and timing.wall_ms),
        runs=timing and timing.runs,
        launches=measured and measured.launches,
        peak_mb=None if measured is None else round(measured.peak_bytes / 1e6, 2),
        error=None if verdict is None else float(f"{verdict.error:.3g}"),
        error_of=None if verdict is None else verdict.error_of,
        roofline_us=None if least is None else round(least, 2),
        roofline_fraction=None if least is None or timing is None else round(least / 1e3 / timing.median_ms, 4),
    )


def key(case: Case, provider: str, mode: str) -> Key:
    """Return the identity of the row of a case, a provider and a mode."""
    return (case.op, case.shape.name, str(case.tokens), case.popularity, case.dtype, provider, mode)


def key_of(row: dict[str, str]) -> Key:
    """Return the identity of a row that was read from a file."""
    return tuple(row[name] for name in ("op", "shape", "tokens", "popularity", "dtype", "provider", "mode"))


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 4)
