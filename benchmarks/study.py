"""What scripts that measure one thing share: their command line, and rows that are printed and kept as soon as they are there."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.tracked import MACHINE, append, commit, this_run

Row = dict[str, Any]
"""What was measured, by its column."""

Cell = str | Callable[[Row], object]
"""What a table shows of a row: a format, such as `{loss:.4f}`, or a function."""


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return the command line of a script: what its docstring says, and `--no-append`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-append", action="store_true", help="print alone, leave the CSV as it is")
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--dtype`."""
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))


def listed(parser: argparse.ArgumentParser, option: str, known: Iterable[object], what: str = "") -> None:
    """Add an option with several values that are joined by commas; by default it has all that are known."""
    values = ",".join(map(str, known))
    parser.add_argument(option, default=values, help=f"{what or 'values'}, joined by commas (default: {values})")


def run_columns(device: str = "cpu") -> Row:
    """Return the columns that all rows of a run share."""
    return asdict(this_run(device))


def short_run_columns() -> Row:
    """Return the columns of a run whose rows name no versions: its day, its commit and its machine."""
    return {"date": date.today().isoformat(), "commit": commit(), "machine": MACHINE}


def tell(rows: Iterable[Row], columns: Mapping[str, Cell], results: Path | None, run: Row) -> list[Row]:
    """Print rows as a table of Markdown, and append them to a CSV, each as soon as it is there.

    Args:
        rows: What is measured.
        columns: Cells by their heading.
        results: The CSV; None to keep nothing.
        run: Columns that all rows share, of `run_columns` or `short_run_columns`.

    Returns:
        All rows.
    """
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    told = []
    for row in rows:
        cells = (cell.format(**row) if isinstance(cell, str) else str(cell(row)) for cell in columns.values())
        print(f"| {' | '.join(cells)} |", flush=True)
        keep(row, results, run)
        told.append(row)
    return told


def keep(row: Row, results: Path | None, run: Row) -> None:
    """Append a row to a CSV, behind the columns that all rows of the run share; without a CSV nothing is kept."""
    if results is not None:
        append([{**run, **row}], results)
