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


def require_working(device: str) -> None:
    """Ask a device to compute, after something failed on it.

    A read outside its memory, and a capture that broke off, spoil a GPU for the whole process: whatever is asked of it
    from then on fails as well, and its rows would keep a run that goes on from measuring it.

    Raises:
        SystemExit: If the device computes no more.
    """
    if device != "cuda":
        return
    try:
        torch.randint(2, (1,), device=device).item()  # a broken capture is known by its random numbers
    except RuntimeError as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise SystemExit(f"the GPU is of no more use to this process ({first_line}); go on with --resume.") from None
