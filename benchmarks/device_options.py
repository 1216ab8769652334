"""The options of a benchmark's device: a CPU, a GPU, or a GPU that is pretended."""

import argparse
import os


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--rehearse`."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="every case on a GPU that is pretended, at tiny sizes: nothing that is measured means anything; "
        "rows go to the folder that --results names",
    )


def prepare_device(arguments: argparse.Namespace) -> None:
    """What must be done before kernels are imported: triton interprets those of a rehearsal.

    Raises:
        SystemExit: If rows of a rehearsal would be kept beside measured ones.
    """
    from benchmarks.tracked import RESULTS

    if arguments.rehearse:
        if arguments.results == RESULTS:
            raise SystemExit(
                "--rehearse needs a folder of its own for rows that mean nothing; name one with --results."
            )
        os.environ["TRITON_INTERPRET"] = "1"
