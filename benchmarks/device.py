"""The device of a benchmark: a CPU, a GPU, or a GPU that is pretended."""

import argparse
import contextlib
from collections.abc import Iterator

import torch


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--rehearse`."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="every case on a pretended GPU: tensors have no values, kernels are compiled and not run; "
        "needs PyTorch's CUDA build",
    )


@contextlib.contextmanager
def chosen_device(arguments: argparse.Namespace) -> Iterator[str]:
    """`"cpu"` or `"cuda"`, as the options of `add_device` say, there while the context lasts.

    Raises:
        SystemExit: If a GPU is to be pretended and this PyTorch is built without CUDA.
    """
    if not arguments.rehearse:
        yield arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        return
    if not torch.backends.cuda.is_built():
        raise SystemExit(
            f"--rehearse: torch {torch.__version__} is built without CUDA, whose functions are what is rehearsed. Use "
            "the environment of constraints-oldest.txt (make .venv-oldest/installed)."
        )
    from benchmarks.pretended_gpu import pretended_gpu

    with pretended_gpu() as gpu:
        yield "cuda"
    print(gpu.report())
