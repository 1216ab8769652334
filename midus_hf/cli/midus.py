"""The `midus` command itself: its help, shell completion, and its message for an unknown command."""

import importlib
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from midus_hf.cli.command_line import command_line, flag, run_command
from midus_hf.cli.entry_points import COMMANDS


class Commands(TyperGroup):
    """Group of commands, each of which is imported when it is first used."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)  # `get_command` fills in the values

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            module = importlib.import_module(f"midus_hf.cli.{COMMANDS[cmd_name]}")
            self.commands[cmd_name] = typer.main.get_command(module.app)
        return self.commands.get(cmd_name)


app = command_line(cls=Commands, add_completion=True)


@app.callback()
def midus(version: Annotated[bool, flag("--version", "Print the version.")] = False) -> None:
    """Train, evaluate, compare and look into language models that upscale has given memory or depth."""


main = partial(run_command, app, name="midus")
