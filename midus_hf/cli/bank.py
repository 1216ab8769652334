"""The `midus bank` command."""

from functools import partial
from typing import Annotated, Any

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.options import Json, argument, option, show

Model = Annotated[str, argument("A checkpoint that upscale made.", "DIR")]
Memory = Annotated[str | None, option("One of several memories.  [default: all]", "NAME")]

app = command_line("List the blocks of a checkpoint's banks. `midus edit delete` deletes what they have learned.")


@app.callback()
def bank() -> None:
    """Keep `list` a separate command, although it is the only one."""


@app.command("list")
def list_(model: Model, memory: Memory = None, json_: Json = False) -> None:
    """Show each level, how large its blocks are, and how many were written."""
    from upscalers.edits.banks import list_banks

    show(list_banks(model, memory), json_, _print_bank)


def _print_bank(listed: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for bank in listed["banks"]:
        table = Table("level", "nodes", "parameters of a block", "written", "deleted", "generic", "on the disk")
        for level in bank["levels"]:
            table.add_row(
                str(level["level"]),
                f"{level['nodes']:,}",
                f"{level['parameters']:,}",
                f"{len(level['written']):,}",
                f"{len(level['deleted']):,}",
                "written" if level["generic"] else "not written",
                f"{level['bytes_on_disk'] / 1e6:,.1f} MB",
            )
        console.print(
            f"{bank['memory']} ({bank['type']}): a text fetches {bank['fetched']:,} of {bank['bank']:,} parameters"
        )
        console.print(table)
    if len(listed["banks"]) > 1:
        console.print(f"all banks: a text fetches {listed['fetched']:,} of {listed['bank']:,} parameters")


main = partial(run_command, app, name="midus bank")
