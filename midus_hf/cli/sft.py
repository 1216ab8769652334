"""The `midus-sft` command."""

import importlib.util
from collections.abc import Sequence
from typing import Annotated

import typer

from midus_hf.cli.exit_status import WRONG_REQUEST, Ending
from midus_hf.cli.training_command import Overrides, documented_keys, run_training_command, train_in_group

_NEEDED = ("datasets", "peft", "trl")


def main(arguments: Sequence[str] | None = None, name: str = "midus-sft") -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name. Default: those of the process.
        name: The program's name, as help has it. Default: `midus-sft`.

    Returns:
        Exit status, as of every command that trains.
    """
    return run_training_command(midus_sft, _keys(), arguments, name)


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
            f"midus-sft needs {', '.join(absent)}, not installed here; pip install 'midus-hf[sft]'.",
        )
    from midus_hf.sft.options import SftConfig
    from midus_hf.sft.run import prepare

    train_in_group(SftConfig, prepare, config, overrides or [])


def _keys() -> dict[str, str]:
    """What the docstrings of the options say of their keys."""
    keys = documented_keys("sft/options.py", "training/run_options.py", "training/optim/rates.py")
    return {
        "keys of CONFIG": f"{keys['RunOptions']}\n{keys['SftConfig']}",
        "rates, which are keys of CONFIG too": keys["Rates"],
        "keys of data": keys["DataOptions"],
        "keys of lora": keys["LoraOptions"],
    }
