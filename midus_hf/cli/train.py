"""The `midus-train` command."""

from collections.abc import Sequence
from typing import Annotated

import typer

from midus_hf.cli.training_command import Overrides, documented_keys, run_training_command, train_in_group


def main(arguments: Sequence[str] | None = None, name: str = "midus-train") -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name. Default: those of the process.
        name: The program's name, as help has it. Default: `midus-train`.

    Returns:
        Exit status, as of every command that trains.
    """
    return run_training_command(midus_train, _keys(), arguments, name)


def midus_train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="YAML file of options; the recipes are in configs/train.")
    ],
    overrides: Overrides = None,
) -> None:
    """Pretrain a model: one that was upscaled, by default as its method says, any other, or one from the beginning."""
    from midus_hf.training.options import TrainConfig
    from midus_hf.training.run.train import prepare

    train_in_group(TrainConfig, prepare, config, overrides or [])


def _keys() -> dict[str, str]:
    """What the docstrings of the options say of their keys."""
    keys = documented_keys("training/options.py", "training/run_options.py", "training/optim/rates.py")
    return {
        "keys of CONFIG": f"{keys['RunOptions']}\n{keys['TrainConfig']}",
        "rates, which are keys of CONFIG too": keys["Rates"],
        "keys of corpus": keys["CorpusOptions"],
        "and, where corpus is a list, of each of its corpora": keys["WeightedCorpus"],
    }
