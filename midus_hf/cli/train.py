"""The `midus train` command."""

from functools import partial
from typing import Annotated

import typer

from midus_hf.cli.command_line import command_line
from midus_hf.cli.training_command import (
    Overrides,
    documented_keys,
    help_on_keys,
    run_training_command,
    train_in_group,
)


def _keys() -> dict[str, str]:
    """Return what the docstrings of the options say of their keys, by what stands above them."""
    keys = documented_keys("training/options.py", "training/run_options.py", "training/optim/rates.py")
    return {
        "keys of CONFIG": f"{keys['RunOptions']}\n{keys['TrainConfig']}",
        "rates, which are keys of CONFIG too": keys["Rates"],
        "keys of corpus": keys["CorpusOptions"],
        "and, where corpus is a list, of each of its corpora": keys["WeightedCorpus"],
    }


app = command_line()


@app.command(epilog=help_on_keys(_keys()))
def midus_train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="YAML file of options; the recipes are in configs/train.")
    ],
    overrides: Overrides = None,
) -> None:
    """Pretrain a model: one that was upscaled, by default as its method says, any other, or one from the beginning."""
    from midus_hf.training.options import TrainConfig

    train_in_group(TrainConfig, "midus_hf.training.run.train", config, overrides or [])


main = partial(run_training_command, app, name="midus train")
