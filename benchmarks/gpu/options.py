"""The command line of `gpu`."""

import argparse
from pathlib import Path

from benchmarks.gpu.steps import FURTHER_STEPS, STEPS
from benchmarks.ops.options import words

SECONDS = 540


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `gpu`."""
    parser = commands.add_parser(
        "gpu",
        help="all that is measured on a GPU, into one folder: kernel tests, ops, the depth, models, profiles, a summary",
        description="Run each step as a process of its own, and leave its rows, profiles, log and a summary in a folder. "
        "Rows are written as they are measured; called again with the same folder, a step goes on where it was cut off. "
        "Ends with status 1 if a step failed.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; it is made")
    parser.add_argument(
        "--steps",
        type=words,
        default=STEPS,
        help=f"default: {','.join(STEPS)}; further ones: {','.join(FURTHER_STEPS)}",
    )
    parser.add_argument(
        "--seconds", type=int, default=SECONDS, help=f"that one step may take, then it is ended (default: {SECONDS})"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="without a GPU: every case once, tiny, on a GPU that is pretended, whose kernels triton interprets",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from benchmarks.gpu.run import run

    return run(arguments)
