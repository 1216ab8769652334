"""Choose the device of a benchmark, and check that it still works."""

import argparse
import contextlib
from collections.abc import Iterator

import torch

from benchmarks.pretended_gpu import pretended_gpu


@contextlib.contextmanager
def chosen_device(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield `"cpu"` or `"cuda"`, as the options of `add_device` choose; a pretended GPU exists while the context lasts."""
    if arguments.rehearse:
        with pretended_gpu():
            yield "cuda"
    else:
        yield arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def require_working(device: str) -> None:
    """Check that a device still computes after an error.

    A read outside of memory or a broken capture spoils a GPU for the whole process: every later call fails as well, and
    the rows of these failures would keep a resumed run from measuring the cases.

    Raises:
        SystemExit: If the device can no longer compute.
    """
    if device != "cuda":
        return
    try:
        torch.randint(2, (1,), device=device).item()  # after a broken capture, random numbers fail
    except RuntimeError as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise SystemExit(f"the GPU is of no more use to this process ({first_line}); go on with --resume.") from None
