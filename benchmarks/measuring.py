"""Measure time and memory of a call, and store a row with the results, the machine and the commit.

`torch.utils.benchmark` times calls: wall time, on a GPU until the device is done, after a warm-up.
"""

import argparse
import csv
import gc
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Measurement, Timer

# Measured values by column.
Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
MACHINE = f"{platform.machine()} {os.cpu_count()} cores"


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return a command line that has the option `--no-append`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-append", action="store_true", help="print the rows, and do not change the CSV")
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, `--dtype` and `--seconds` to a command line."""
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16" if gpu else "float32"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of timing per call (default: 2)")


def add_list(parser: argparse.ArgumentParser, option: str, known: Iterable[str], default: Iterable[str] = ()) -> None:
    """Add an option whose value is a list of known names, joined by commas. Default: `default`, or all of them."""
    names = list(known)
    chosen = list(default) or list(known)

    def chosen_names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; expected some of {', '.join(names)}.")
        return text.split(",")

    parser.add_argument(option, type=chosen_names, default=chosen, help=f"some of {','.join(names)}")


def numbers(text: str) -> list[int]:
    """Return the whole numbers of a list that is joined by commas."""
    return [int(word) for word in text.split(",")]


def timed(call: Callable[[], object], seconds: float) -> Measurement:
    """Time a call repeatedly for at least `seconds`, at least once, with the number of threads that PyTorch uses now."""
    call()
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds)


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Return the peak of the bytes that tensors held during a call, beyond the bytes held before.

    A GPU's allocator counts the bytes. On a CPU, PyTorch's profiler records allocations, so memory of the interpreter
    and of libraries with their own allocators does not count.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profile.kineto_results.events()  # type: ignore[union-attr]
        if event.name() == "[memory]"
    ]
    held = most = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        held += change
        most = max(most, held)
    return most


def release_memory(device: str) -> None:
    """Free the memory that no tensor holds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that an allocation failed, on a GPU or on a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def commit() -> str:
    """Return the commit that is checked out, with `-dirty` if files other than results and pages differ; `unknown` without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results", ":(top,exclude)docs")
        return (git("describe", "--always") or "unknown") + ("-dirty" if changed else "")
    except FileNotFoundError:
        return "unknown"


def run_columns(device: str = "cpu") -> Row:
    """Return the columns that all rows of a run share: time, commit, machine, device and versions."""
    threads = torch.get_num_threads()
    on_cpu = f"{MACHINE}, {threads} {'thread' if threads == 1 else 'threads'}"
    return {
        "date": datetime.now().isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": on_cpu if device == "cpu" else MACHINE,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        **{name: _version(name) for name in ("torch", "triton", "transformers")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def tell(rows: Iterable[Row], columns: Mapping[str, str], results: Path | None, run: Row) -> list[Row]:
    """Print rows as a Markdown table and append them to a CSV, each as soon as it is measured; return all rows.

    Args:
        rows: Measured values by column.
        columns: Format of each printed column, such as `{loss:.4f}`, by its header.
        results: The CSV; None to store nothing.
        run: Columns that all rows share.
    """
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    printed = []
    for row in rows:
        print(f"| {' | '.join(cell.format(**row) for cell in columns.values())} |", flush=True)
        if results is not None:
            append([{**run, **row}], results)
        printed.append(row)
    return printed


def append(rows: list[Row], results: Path) -> None:
    """Append rows to a CSV. A new file gets a header.

    Raises:
        ValueError: If the file has other columns.
    """
    if not rows:
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    is_new = not results.exists()
    if not is_new:
        with results.open(newline="") as stream:
            header = next(csv.reader(stream))
        if sorted(header) != sorted(columns):
            raise ValueError(f"{results} has the columns {header}; expected {columns}. Move it away, or convert it.")
        columns = header
    with results.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=columns)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
