"""The command line of `tiles`."""

import argparse
from pathlib import Path

from benchmarks.device_options import add_device, prepare_device
from benchmarks.ops.options import add_results, add_resumption, words

TABLE = Path(__file__).resolve().parents[2] / "midus_hf" / "ops" / "dispatch" / "tiles.json"
"""The table that kernels read. It is named here since importing ops imports Triton, which a rehearsal first tells to interpret."""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `tiles`."""
    parser = commands.add_parser(
        "tiles",
        help="which tiles of kernels are the fastest on this GPU, and a table of them that kernels read",
        description="Try the few tiles that the rule of a kernel allows at the papers' shapes, and time those that compute what the "
        "rule's own does; rows are appended to tiles.csv. Nothing else ever searches: kernels take what was written down for their "
        "device, and the rule's where nothing was. Ends with status 1 if a tile computed something else.",
    )
    add_device(parser)
    parser.add_argument("--kernels", type=words, help="default: all that have tiles, most important first")
    parser.add_argument("--cases", type=words, help="default: all")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing, a kernel and case (default: 2)")
    add_resumption(parser, "kernel")
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=TABLE,
        metavar="FILE",
        help="write down what was faster than the rule, beside what is known already (default: into the table that kernels read)",
    )
    add_results(parser)
    parser.set_defaults(run=_run, table=TABLE)


def _run(arguments: argparse.Namespace) -> int:
    arguments.write = arguments.write and arguments.write.resolve()
    if arguments.rehearse and arguments.write == arguments.table:
        raise SystemExit("--rehearse measures nothing that kernels could go by; name another file with --write.")
    if arguments.write and arguments.no_append:
        raise SystemExit("--write reads the rows that --no-append leaves out; drop one of them.")
    prepare_device(arguments)
    from benchmarks.tiles.run import run

    return run(arguments)
