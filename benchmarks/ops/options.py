"""The command line of `ops`."""

import argparse
from pathlib import Path

from benchmarks.device_options import add_device, prepare_device
from benchmarks.ops.shapes import MODES, SHAPES
from benchmarks.tracked import RESULTS


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `ops`."""
    parser = commands.add_parser(
        "ops",
        help="ops alone: correctness against float64, then time and memory",
        description="Compare implementations of ops; rows are appended to ops.csv. Ends with status 1 if one of them is "
        "wrong or fails; that one gets no timing.",
    )
    add_device(parser)
    parser.add_argument("--ops", type=words, help="default: all, most important first")
    parser.add_argument("--providers", type=words, help="default: all")
    parser.add_argument("--shapes", type=words, help=f"of {', '.join(SHAPES)}; default: what fits the device")
    parser.add_argument("--tokens", type=numbers, help="default: 32768,1 on a GPU, 4096,1 on a CPU")
    parser.add_argument("--popularity", type=words, help="default: both")
    parser.add_argument("--modes", type=words, default=list(MODES), help="default: all three")
    parser.add_argument("--dtype", type=words, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing, a case and mode (default: 2)")
    parser.add_argument(
        "--backend",
        choices=("auto", "torch", "native", "triton"),
        default="auto",
        help="what this project's ops run, to try kernels (on a CPU with TRITON_INTERPRET=1); its rows are not kept",
    )
    add_resumption(parser, "case")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also write the kernels of a run of this project's default and of the compiled rivals, on the first popularity, "
        "to profile.csv",
    )
    add_results(parser)
    parser.set_defaults(run=_run)


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


def _run(arguments: argparse.Namespace) -> int:
    prepare_device(arguments)
    from benchmarks.ops.run import run

    return run(arguments)
