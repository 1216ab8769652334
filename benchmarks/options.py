"""Options that commands share: the device, where rows go, and how a run that was cut off goes on."""

import argparse
import os
from pathlib import Path

from benchmarks.tracked import RESULTS


def device_command(description: str | None) -> argparse.ArgumentParser:
    """Return the command line of a script that has the device of `add_device` and the results of `add_results`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    add_results(parser)
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--rehearse`: a CPU, a GPU, or a GPU that is pretended."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="every case on a GPU that is pretended, at tiny sizes: nothing that is measured means anything; "
        "rows go to the folder that --results names",
    )


def prepare_device(arguments: argparse.Namespace) -> None:
    """Do what must be done before kernels are imported: triton interprets those of a rehearsal.

    Raises:
        SystemExit: If rows of a rehearsal would be kept beside measured ones.
    """
    if arguments.rehearse:
        if arguments.results == RESULTS:
            raise SystemExit(
                "--rehearse needs a folder of its own for rows that mean nothing; name one with --results."
            )
        os.environ["TRITON_INTERPRET"] = "1"


def add_resumption(parser: argparse.ArgumentParser, what: str) -> None:
    """Options on when a run ends, before which measurement, and on going on with it."""
    parser.add_argument("--budget", type=float, help=f"seconds after which no further {what} is begun")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the newest run of the same commit, machine, device and versions: what has a row is not measured",
    )


def add_results(parser: argparse.ArgumentParser) -> None:
    """Options on where rows go."""
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV (default: the tracked one)")
    parser.add_argument("--no-append", action="store_true", help="print, leave the CSV alone")


def words(text: str) -> list[str]:
    """Joined by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """Joined by commas."""
    return [int(word) for word in words(text)]
