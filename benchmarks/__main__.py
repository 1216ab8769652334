"""`python -m benchmarks gpu | ops | model | kernels | report`, from the root of the repository.

Needs torch and transformers, on a GPU and for `kernels` triton; `report` draws with matplotlib.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

from benchmarks.gpu.run import FURTHER_STEPS, SECONDS, STEPS
from benchmarks.models.points import CONFIGS, METHODS, PHASES
from benchmarks.ops.shapes import MODES, SHAPES
from benchmarks.options import MOST_SHARED_MEMORY, add_device, add_results, add_resumption, numbers, words
from benchmarks.report import DOCUMENT, IMAGES
from benchmarks.tracked import RESULTS


def main(arguments: list[str] | None = None) -> int:
    """Run one of the benchmarks and return its exit status."""
    chosen = command_line().parse_args(arguments)
    if chosen.command == "kernels":
        os.environ.pop("TRITON_INTERPRET", None)  # kernels that are interpreted cannot be compiled
    # A command's module is imported only when the command runs, so that `report` runs without torch.
    return importlib.import_module(chosen.module).run(chosen)


def command_line() -> argparse.ArgumentParser:
    """Return the command line of all benchmarks.

    The parsed arguments have `module`, the name of the module whose function `run` takes the arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_gpu, _add_ops, _add_model, _add_kernels, _add_report):
        add(commands)
    return parser


def _add_gpu(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "gpu",
        help="all that is measured on a GPU, into one folder: kernel tests, ops, models, profiles, a summary",
        description="Run each step as a process of its own, and leave its rows, profiles, log and a summary in a folder. "
        "Rows are written as they are measured; called again with the same folder, a step goes on where it was cut off. "
        "Ends with status 1 if a step failed.",
    )
    parser.set_defaults(module="benchmarks.gpu.run")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, created if it does not exist")
    parser.add_argument(
        "--steps",
        type=words,
        default=STEPS,
        help=f"default: {','.join(STEPS)}; further ones: {','.join(FURTHER_STEPS)}",
    )
    parser.add_argument("--seconds", type=int, default=SECONDS, help=f"time limit of one step (default: {SECONDS})")


def _add_ops(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "ops",
        help="ops alone: correctness against float64, then time and memory",
        description="Compare implementations of ops; rows are appended to ops.csv. Ends with status 1 if one of them is "
        "wrong or fails; that one gets no timing.",
    )
    parser.set_defaults(module="benchmarks.ops.bench")
    add_device(parser)
    parser.add_argument("--ops", type=words, help="default: all, most important first")
    parser.add_argument("--providers", type=words, help="default: all")
    parser.add_argument("--shapes", type=words, help=f"some of {', '.join(SHAPES)}; default: what fits the device")
    parser.add_argument("--tokens", type=numbers, help="default: 32768,1 on a GPU, 4096,1 on a CPU")
    parser.add_argument("--popularity", type=words, help="default: both")
    parser.add_argument("--modes", type=words, default=list(MODES), help="default: all three")
    parser.add_argument("--dtype", type=words, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of timing per case and mode (default: 2)")
    parser.add_argument(
        "--backend",
        choices=("auto", "torch", "native", "triton"),
        default="auto",
        help="backend of this project's ops (default: auto); rows of any other are not stored, and triton on a CPU needs "
        "TRITON_INTERPRET=1",
    )
    add_resumption(parser, "case")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also write the kernels of a run of this project's default and of the compiled rivals, on the first popularity, "
        "to profile.csv",
    )
    add_results(parser)


def _add_model(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "model",
        help="whole models with random weights: memory, training steps, generation, prefill",
        description="Compare a base with its upscaled models, built with random weights from a config.json; rows are appended "
        "to model.csv as soon as they are measured. Defaults follow the paper's efficiency experiments on a GPU and are "
        "smaller on a CPU.",
    )
    parser.set_defaults(module="benchmarks.models.run")
    known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
    parser.add_argument("--base", type=words, default=["smollm2-135m"], help=f"some of {known}, or a config.json")
    parser.add_argument("--methods", type=words, default=METHODS, help=f"default: {','.join(METHODS)}")
    parser.add_argument(
        "--placements",
        type=words,
        help="for every method that takes one (default: its own, and top-heavy beside it for memory)",
    )
    add_device(parser)
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--phases", type=words, default=PHASES, help=f"default: {','.join(PHASES)}")
    parser.add_argument(
        "--batches", type=numbers, help="batch sizes beside 16 (of 1B models 64; CPU 4) to time a step at"
    )
    parser.add_argument("--lengths", type=numbers, help="lengths beside 2048 (CPU 64) to time a step at")
    parser.add_argument(
        "--decoding",
        type=words,
        help="eager, as generate() does; graph, a static cache and one captured step, replayed; compiled, the same with "
        "the step compiled first, which takes a minute per model and batch (default: eager; on a GPU eager,graph)",
    )
    parser.add_argument(
        "--generate-batches",
        type=numbers,
        help="sequences generated at once by graph and compiled; eager generates one (default: 1,8,32; CPU 1)",
    )
    parser.add_argument(
        "--prompts", type=numbers, help="prompt lengths of prefill (default: 512,2048,8192; CPU 64,256)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all models in turn (default: 3)")
    add_resumption(parser, "measurement")
    parser.add_argument("--profile", action="store_true", help="append what ran, kernel by kernel, to profile.csv")
    parser.add_argument("--quick", action="store_true", help="one round at tiny sizes, to see that everything runs")
    add_results(parser)


def _add_kernels(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "kernels",
        help="compile kernels for GPUs that are not here: registers and shared memory",
        description="Compile every kernel as it would be launched, and print its shared memory, registers and spills. "
        "Ends with status 1 if a kernel needs more shared memory than its target has.",
    )
    parser.set_defaults(module="benchmarks.kernels")
    parser.add_argument("--targets", type=words, default=list(MOST_SHARED_MEMORY), help="default: all")
    parser.add_argument("--kernels", type=words, help="names of kernels; default: all")
    parser.add_argument("--cases", type=words, help="names of cases; default: all")
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def _add_report(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "report",
        help="tables in docs/benchmarks.md and plots in docs/images from the CSV files",
        description="Replace the text between the markers of the document. Plots need matplotlib.",
    )
    parser.set_defaults(module="benchmarks.report")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files (default: the tracked)")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="default: docs/benchmarks.md")
    parser.add_argument("--images", type=Path, default=IMAGES, help="default: docs/images")
    parser.add_argument("--print-ops", action="store_true", help="print the tables of all ops, and write nothing")


if __name__ == "__main__":
    sys.exit(main())
