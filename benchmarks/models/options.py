"""The command line of `model`."""

import argparse

from benchmarks.device_options import add_device, prepare_device
from benchmarks.models.bases import CONFIGS
from benchmarks.models.points import PHASES
from benchmarks.ops.options import add_results, add_resumption, numbers, words

METHODS = ["base", "llama-pro", "opt-deus", "midus-hml", "midus-pkm", "midus-linear", "moc", "solar"]


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `model`."""
    parser = commands.add_parser(
        "model",
        help="whole models with random weights: memory, training steps, generation, prefill",
        description="Compare a base with what upscaling methods make of it, from its config.json alone; rows are appended "
        "to model.csv as soon as they are measured. Defaults follow the paper's efficiency experiments on a GPU and are "
        "smaller on a CPU.",
    )
    known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
    parser.add_argument("--base", type=words, default=["smollm2-135m"], help=f"of {known}, or a config.json")
    parser.add_argument("--methods", type=words, default=METHODS, help=f"default: {','.join(METHODS)}")
    parser.add_argument(
        "--placements",
        type=words,
        help="for every method that takes one (default: its own, and top-heavy beside it for memory)",
    )
    add_device(parser)
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--phases", type=words, default=PHASES, help=f"default: {','.join(PHASES)}")
    parser.add_argument("--batch", type=int, help="sequences an optimizer step (default: 16, of 1B models 64; CPU 4)")
    parser.add_argument("--accumulation", type=int, help="forward passes an optimizer step (default: 16; CPU 2)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (default: 2048; CPU 64)")
    parser.add_argument("--batches", type=numbers, help="more batch sizes to time a step at")
    parser.add_argument("--lengths", type=numbers, help="more lengths to time a step at")
    parser.add_argument("--prompt", type=int, help="tokens in front of those generated (default: 128; CPU 32)")
    parser.add_argument("--new-tokens", type=int, help="tokens generated (default: 128; CPU 32)")
    parser.add_argument(
        "--decoding",
        type=words,
        help="eager, as generate() does; graph, a static cache and one captured step, replayed; compiled, the same with "
        "the step compiled first, which takes a minute a model and batch (default: eager; on a GPU eager,graph)",
    )
    parser.add_argument(
        "--generate-batches",
        type=numbers,
        help="sequences generated at once by graph and compiled; eager generates one (default: 1,8,32; CPU 1)",
    )
    parser.add_argument(
        "--prompts", type=numbers, help="prompt lengths of prefill (default: 512,2048,8192; CPU 64,256)"
    )
    parser.add_argument("--prefill-batches", type=numbers, default=[1], help="default: 1")
    parser.add_argument("--rounds", type=int, default=3, help="over all models in turn (default: 3)")
    add_resumption(parser, "measurement")
    parser.add_argument("--profile", action="store_true", help="append what ran, kernel by kernel, to profile.csv")
    parser.add_argument("--quick", action="store_true", help="one round of almost nothing, to see that it runs")
    add_results(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    prepare_device(arguments)
    from benchmarks.models.run import run

    return run(arguments)
