"""Tracked results: rows of a CSV, and the columns that identify their run."""

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
    """Columns that all rows of one run share.

    Args:
        date: Time at which the run began, to the second, in ISO format.
        commit: Commit of the code, from the function `commit`.
        machine: Processor and number of cores; if a CPU is measured, also PyTorch's number of threads.
        device: Name of the GPU, or `"cpu"`.
        torch: Version of PyTorch.
        triton: Version of Triton; empty if Triton is not installed.
        transformers: Version of transformers.
    """

    date: str
    commit: str
    machine: str
    device: str
    torch: str
    triton: str
    transformers: str


def commit() -> str:
    """Return the commit that is checked out, with `-dirty-` and a digest of the code if files other than results and docs differ.

    Without git, as on a machine that got only the files, return the environment variable `BENCH_COMMIT`, or the digest
    after `files-`. By the digest, a run resumes only rows of the same code.
    """
    try:
        described = _git("describe", "--always")
        # Rows of earlier benchmarks, and documents made from them, do not change what is measured.
        results = [f":(top,exclude){folder}" for folder in ("benchmarks/results", "experiments/results", "docs")]
        changed = _git("status", "--porcelain", "--", ":/", *results)
    except FileNotFoundError:
        described = changed = ""
    if not described:
        return os.environ.get("BENCH_COMMIT") or f"files-{_digest()}"
    return f"{described}-dirty-{_digest()}" if changed else described


# Suffixes of the files whose digest identifies code that no commit has: Python, C, and configs of measured models.
_SUFFIXES = {".py", ".c", ".h", ".json"}


def _digest() -> str:
    """Return a digest of the code that is measured, and of the code and configs that measure."""
    root, digest = RESULTS.parent.parent, hashlib.sha256()
    for folder in ("benchmarks", "midus_hf", "upscalers"):
        for path in sorted(path for path in (root / folder).rglob("*") if path.suffix in _SUFFIXES):
            digest.update(f"{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _sameness(run: Run) -> dict[str, str]:
    return {name: value for name, value in asdict(run).items() if name != "date"}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()


def this_run(device: str) -> Run:
    """Describe a run that begins now on `device`, `"cpu"` or `"cuda"`."""
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
    """Return the number of threads in words, which ends a machine's description if a CPU is measured."""
    return f"{count} thread{'s' * (count > 1)}"


def resumed(this: Run, results: Path) -> Run:
    """Return the newest run in a CSV with the commit, machine, device and versions of `this`; `this` if the CSV has none."""
    dates = [
        row["date"] for row in read(results) if all(row[name] == value for name, value in _sameness(this).items())
    ]
    return replace(this, date=max(dates)) if dates else this


def rows_of(this: Run, results: Path) -> list[dict[str, str]]:
    """Return the rows that a CSV has of one run, as text."""
    return [row for row in read(results) if all(row[name] == value for name, value in asdict(this).items())]


def append(rows: Sequence[Any], results: Path) -> None:
    """Append rows, dataclasses or mappings, to a CSV. A new file gets a header."""
    if not rows:
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    values = [row if isinstance(row, Mapping) else asdict(row) for row in rows]
    columns = list(values[0])
    is_new = not results.exists()
    if not is_new:
        header = results.open(newline="").readline().strip().split(",")
        if sorted(header) != sorted(columns):
            raise ValueError(f"{results} has the columns {header}; expected {columns}. Move it away, or convert it.")
        columns = header
    with results.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=columns)
        if is_new:
            writer.writeheader()
        writer.writerows(values)


def read(results: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV as text; an absent file has no rows."""
    if not results.exists():
        return []
    with results.open(newline="") as stream:
        return list(csv.DictReader(stream))
