"""Results that are tracked: rows of a CSV, and what identifies the run they come from."""

import csv
import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MACHINE = f"{platform.machine()} {os.cpu_count()} cores"


@dataclass(frozen=True)
class Run:
    """What all rows of one run share.

    Args:
        date: When it began, to the second; rows of one run have the same.
        commit: As `commit`.
        machine: Processor and number of cores; behind them, where a CPU is measured, how many threads PyTorch has.
        device: The GPU's name, or "cpu".
        torch: Version.
        triton: Version, or nothing where it is not installed.
        transformers: Version.
    """

    date: str
    commit: str
    machine: str
    device: str
    torch: str
    triton: str
    transformers: str


def commit() -> str:
    """The commit that is checked out, marked `-dirty` where files other than results and docs differ.

    Where there is no git, as on a machine that was sent the files alone, what `BENCH_COMMIT` says, or a digest of the
    code: a run goes on with rows of the same code alone.
    """
    try:
        described = _git("describe", "--always")
        # Rows of an earlier benchmark and what is generated from them change nothing that is measured.
        results = [f":(top,exclude){folder}" for folder in ("benchmarks/results", "experiments/results", "docs")]
        changed = _git("status", "--porcelain", "--", ":/", *results)
    except FileNotFoundError:
        described = changed = ""
    if not described:
        return os.environ.get("BENCH_COMMIT") or f"files-{_digest()}"
    return f"{described}-dirty" if changed else described


def _digest() -> str:
    """Of the code that is measured, and that measures."""
    root, digest = RESULTS.parent.parent, hashlib.sha256()
    for folder in ("benchmarks", "midus_hf", "upscalers"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _sameness(run: Run) -> dict[str, str]:
    return {name: value for name, value in asdict(run).items() if name != "date"}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()


def this_run(device: str) -> Run:
    """Describe the run that begins now.

    Args:
        device: `"cpu"` or `"cuda"`.
    """
    import torch
    import transformers

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    return Run(
        date=datetime.now().isoformat(timespec="seconds"),
        commit=commit(),
        machine=f"{MACHINE}, {threads(torch.get_num_threads())}" if device == "cpu" else MACHINE,
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        torch=torch.__version__,
        triton=triton_version,
        transformers=transformers.__version__,
    )


def threads(count: int) -> str:
    """How a machine's description ends where a CPU is measured."""
    return f"{count} thread{'s' * (count > 1)}"


def resumed(this: Run, results: Path) -> Run:
    """The newest run of a CSV with the same commit, machine, device and versions, to go on with; else `this`."""
    found = [
        row["date"] for row in read(results) if all(row[name] == value for name, value in _sameness(this).items())
    ]
    return replace(this, date=max(found)) if found else this


def rows_of(this: Run, results: Path) -> list[dict[str, str]]:
    """What a CSV holds of one run, as text."""
    return [row for row in read(results) if all(row[name] == value for name, value in asdict(this).items())]


def append(rows: Sequence[Any], results: Path) -> None:
    """Append rows, dataclasses or mappings, to a CSV, with a header if it is new.

    Raises:
        ValueError: If the CSV has other columns.
    """
    if not rows:
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    values = [row if isinstance(row, Mapping) else asdict(row) for row in rows]
    columns = list(values[0])
    is_new = not results.exists()
    if not is_new:
        found = results.open(newline="").readline().strip().split(",")
        if sorted(found) != sorted(columns):
            raise ValueError(f"{results} has the columns {found}; expected {columns}. Move it away, or convert it.")
        columns = found
    with results.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=columns)
        if is_new:
            writer.writeheader()
        writer.writerows(values)


def read(results: Path) -> list[dict[str, str]]:
    """The rows of a CSV, as text; none where there is no such file."""
    if not results.exists():
        return []
    with results.open(newline="") as stream:
        return list(csv.DictReader(stream))
