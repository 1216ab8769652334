"""The command line of continual pretraining: `train_cpt.py CONFIG.yaml [key=value ...]`."""

import argparse
import inspect
import sys
from collections.abc import Sequence

from accelerate import PartialState

from midus_hf.config_file import read_config
from midus_hf.documents import DocumentError
from midus_hf.training.options import CorpusOptions, TrainConfig, WeightedCorpus
from midus_hf.training.run import prepare


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name. Default: those of the process.

    Returns:
        Exit status: 0 done, 2 the request is wrong (one line on standard error says how). A failure of the work
        raises.
    """
    options = _parser().parse_args(arguments)
    try:
        run = prepare(read_config(TrainConfig, options.config, options.overrides))
    except ValueError as error:
        return _refuse(error)
    try:
        result = run.execute()
    except DocumentError as error:
        return _refuse(error)
    if not PartialState().is_main_process:
        return 0
    speed = "" if result.tokens_per_second is None else f", {result.tokens_per_second:,.0f} tokens/s"
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    print(f"{result.output}: {result.steps:,} steps, {result.tokens:,} tokens{loss}{speed}")
    return 0


def _refuse(error: ValueError) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_cpt.py",
        description="Continue the pretraining of a model, by default of the layers that its upscaling method trains.",
        epilog=f"{_keys(TrainConfig)}\n\nkeys of corpus:\n{_keys(CorpusOptions)}\n\n"
        f"and, where corpus is a list, of each of its corpora:\n{_keys(WeightedCorpus)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="YAML file of options; the recipes are in configs/train")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options that replace those of the file")
    return parser


def _keys(options_class: type) -> str:
    """The part of a docstring that describes the keys."""
    return (inspect.getdoc(options_class) or "").partition("Args:\n")[2].partition("\n\nRaises:")[0]
