"""The device of a benchmark."""

import argparse
import contextlib
from collections.abc import Iterator

import torch

from benchmarks.pretended_gpu import pretended_gpu


@contextlib.contextmanager
def chosen_device(arguments: argparse.Namespace) -> Iterator[str]:
    """`"cpu"` or `"cuda"`, as the options of `add_device` say, there while the context lasts."""
    if arguments.rehearse:
        with pretended_gpu():
            yield "cuda"
    else:
        yield arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
