"""Helpers of scripts that measure one thing: a command line, and rows that are printed and stored at once."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.tracked import MACHINE, append, commit, this_run

# Measured values by column.
Row = dict[str, Any]

# Cell of a table for a row: a format, such as `{loss:.4f}`, or a function of the row.
Cell = str | Callable[[Row], object]


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return the command line of a script, with a description and the option `--no-append`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-append", action="store_true", help="print alone, leave the CSV as it is")
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--dtype`."""
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))


def listed(parser: argparse.ArgumentParser, option: str, known: Iterable[object], what: str = "") -> None:
    """Add an option whose value is a list joined by commas. Default: all known values."""
    values = ",".join(map(str, known))
    parser.add_argument(option, default=values, help=f"{what or 'values'}, joined by commas (default: {values})")


def run_columns(device: str = "cpu") -> Row:
    """Return the columns that all rows of a run share: the fields of `benchmarks.tracked.Run`."""
    return asdict(this_run(device))


def short_run_columns() -> Row:
    """Return the columns of a run whose rows name no versions: day, commit and machine."""
    return {"date": date.today().isoformat(), "commit": commit(), "machine": MACHINE}


def tell(rows: Iterable[Row], columns: Mapping[str, Cell], results: Path | None, run: Row) -> list[Row]:
    """Print rows as a Markdown table and append them to a CSV, each as soon as it is measured; return all rows."""
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    shown = []
    for row in rows:
        cells = (cell.format(**row) if isinstance(cell, str) else str(cell(row)) for cell in columns.values())
        print(f"| {' | '.join(cells)} |", flush=True)
        keep(row, results, run)
        shown.append(row)
    return shown


def keep(row: Row, results: Path | None, run: Row) -> None:
    """Append a row to a CSV, after the columns that all rows of the run share. Without a CSV nothing is stored."""
    if results is not None:
        append([{**run, **row}], results)
