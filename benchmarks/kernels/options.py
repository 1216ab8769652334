"""The command line of `kernels`."""

import argparse
import os

from benchmarks.kernels.targets import MOST_SHARED_MEMORY
from benchmarks.ops.options import words


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `kernels`."""
    parser = commands.add_parser(
        "kernels",
        help="compile kernels for GPUs that are not here: registers, shared memory, instructions",
        description="Compile every kernel as it would be launched, and print its shared memory, registers and spills, the "
        "instructions of a warp by class, and what an H200 takes at least for them. Ends with status 1 if one needs more "
        "shared memory than its target has.",
    )
    parser.add_argument("--targets", type=words, default=list(MOST_SHARED_MEMORY), help="default: all")
    parser.add_argument("--kernels", type=words, help="names of kernels; default: all")
    parser.add_argument("--cases", type=words, help="names of what kernels are asked for; default: all")
    parser.add_argument(
        "--count", type=words, help="names of cases whose instructions are counted; default: all of these"
    )
    parser.add_argument("--candidates", action="store_true", help="also the tiles that `tiles` would try")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    unknown = sorted(set(arguments.targets) - set(MOST_SHARED_MEMORY))
    if unknown:
        raise SystemExit(f"no target {', '.join(unknown)}; expected some of {', '.join(MOST_SHARED_MEMORY)}.")
    os.environ.pop("TRITON_INTERPRET", None)  # kernels that are interpreted cannot be compiled
    from benchmarks.kernels.run import run

    return run(
        arguments.targets, arguments.kernels, arguments.cases, arguments.count, arguments.json, arguments.candidates
    )
