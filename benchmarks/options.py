"""Options that commands share: the device, the folder of results, and the resumption of a run."""

import argparse
from pathlib import Path

from benchmarks.tracked import RESULTS

# Bytes that one program may use on the GPUs that kernels are compiled for, by target.
MOST_SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}


def device_command(description: str | None) -> argparse.ArgumentParser:
    """Return the command line of a script, with the options of `add_device` and `add_results`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    add_results(parser)
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`: a CPU, a GPU, or by default a GPU where there is one."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def chosen_device(arguments: argparse.Namespace) -> str:
    """Return `"cpu"` or `"cuda"`, as `--device` chooses."""
    import torch  # here, so that reports need no torch

    return arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def add_resumption(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--budget`, a time limit after which no further `what` begins, and `--resume`."""
    parser.add_argument("--budget", type=float, help=f"seconds after which no further {what} begins")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the newest run of the same commit, machine, device and versions, without what has a row already",
    )


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add `--results`, the folder of the CSV, and `--no-append`."""
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV (default: the tracked one)")
    parser.add_argument("--no-append", action="store_true", help="print, leave the CSV alone")


def words(text: str) -> list[str]:
    """Split a list of words that is joined by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """Split a list of whole numbers that is joined by commas."""
    return [int(word) for word in words(text)]
