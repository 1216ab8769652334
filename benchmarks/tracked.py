"""Results that are tracked: rows of a CSV, and what identifies the run they come from."""

import csv
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MACHINE = f"{platform.machine()} {os.cpu_count()} cores"


def commit() -> str:
    """The commit that is checked out, marked `-dirty` where files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()


def append(rows: Sequence[Any], results: Path) -> None:
    """Append dataclass rows to a CSV, with a header if it is new."""
    if not rows:
        return
    results.parent.mkdir(exist_ok=True)
    is_new = not results.exists()
    with results.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(asdict(rows[0])))
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
