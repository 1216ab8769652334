"""The device of a benchmark: a CPU, a GPU, or a GPU that is pretended."""

import argparse
import contextlib
from collections.abc import Iterator

import torch

from benchmarks.pretended_gpu import pretended_gpu


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--rehearse`."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="every case on a GPU that is pretended, at tiny sizes: nothing that is measured means anything",
    )


@contextlib.contextmanager
def chosen_device(arguments: argparse.Namespace) -> Iterator[str]:
    """`"cpu"` or `"cuda"`, as the options of `add_device` say, there while the context lasts."""
    if arguments.rehearse:
        with pretended_gpu():
            yield "cuda"
    else:
        yield arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
