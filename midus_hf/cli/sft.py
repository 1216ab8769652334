"""The `midus sft` command."""

import importlib.util
from functools import partial
from typing import Annotated

import typer

from midus_hf.cli.command_line import WRONG_REQUEST, Ending, command_line
from midus_hf.cli.training_command import (
    Overrides,
    documented_keys,
    help_on_keys,
    run_training_command,
    train_in_group,
)

_NEEDED = ("datasets", "peft", "trl")


def _keys() -> dict[str, str]:
    """Return what the docstrings of the options say of their keys, by what stands above them."""
    keys = documented_keys("sft/options.py", "training/run_options.py", "training/optim/rates.py")
    return {
        "keys of CONFIG": f"{keys['RunOptions']}\n{keys['SftConfig']}",
        "rates, which are keys of CONFIG too": keys["Rates"],
    }


app = command_line()


@app.command(epilog=help_on_keys(_keys()))
def midus_sft(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="YAML file of options; the recipes are in configs/sft.")
    ],
    overrides: Overrides = None,
) -> None:
    """Fine-tune a model on chats, with the loss of answers alone."""
    absent = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if absent:
        raise Ending(
            WRONG_REQUEST,
            f"midus sft needs {', '.join(absent)}, not installed here; pip install 'midus-hf[train]'.",
        )
    from midus_hf.sft.options import SftConfig

    train_in_group(SftConfig, "midus_hf.sft.run", config, overrides or [])


main = partial(run_training_command, app, name="midus sft")
