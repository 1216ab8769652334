"""The `midus-train` command."""

from collections.abc import Sequence
from typing import Annotated

import typer

from midus_commands.exit_status import run_command
from midus_commands.training_command import documented_keys, help_sections, is_main_process, train_in_group


def main(arguments: Sequence[str] | None = None, name: str = "midus-train") -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name. Default: those of the process.
        name: The program's name, as help has it. Default: `midus-train`.

    Returns:
        Exit status: 0 done, 1 the trained model is not in the output, 2 the request is wrong, 130 or 143 interrupted
        by Ctrl-C or SIGTERM; one line on standard error says how. Any other failure of the work raises.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(epilog=_keys(), context_settings={"help_option_names": ["-h", "--help"]})(midus_train)
    return run_command(
        app,
        arguments,
        name,
        named_lines=False,
        refusals=(),  # only while a run is prepared is a ValueError one: later it is a failure, and shows where
        hint=f" See '{name} --help'.",
        failure=None,
        silent=not is_main_process(),
    )


def midus_train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="YAML file of options; the recipes are in configs/train.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Options that replace those of the file.", show_default=False),
    ] = None,
) -> None:
    """Pretrain a model: one that was upscaled, by default as its method says, any other, or one from the beginning."""
    from midus_hf.training.options import TrainConfig
    from midus_hf.training.run import prepare

    train_in_group(TrainConfig, prepare, config, overrides or [])


def _keys() -> str:
    """What the docstrings of the options say of their keys."""
    keys = documented_keys("training/options.py", "training/run_options.py", "training/rates.py")
    return help_sections(
        {
            "keys of CONFIG": f"{keys['RunOptions']}\n{keys['TrainConfig']}",
            "rates, which are keys of CONFIG too": keys["Rates"],
            "keys of corpus": keys["CorpusOptions"],
            "and, where corpus is a list, of each of its corpora": keys["WeightedCorpus"],
        }
    )
