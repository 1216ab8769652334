"""The `midus-bank` command."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from midus_hf.cli.exit_status import run_command
from midus_hf.cli.reading import Json

app = typer.Typer(
    name="midus-bank",
    help="List and edit the blocks of a checkpoint's bank, and put together what runs have trained of it. The checkpoint that is "
    "read stays as it is.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(help="A checkpoint with a bank, made by upscale.", metavar="DIR")]
Nodes = Annotated[
    list[str] | None,
    typer.Option("--node", help="LEVEL:NODE, or LEVEL:generic; repeat at will.  [required]", metavar="NODE"),
]
Subtree = Annotated[bool, typer.Option("--subtree", help="And all nodes below.")]
Output = Annotated[str, typer.Option(help="Folder to make.", metavar="DIR2")]
Memory = Annotated[str | None, typer.Option(help="One of several memories.  [default: the only one]", metavar="NAME")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what upscale or this command wrote there.")]


@app.command("list")
def list_(model: Model, memory: Memory = None, json_: Json = False) -> None:
    """Show each level, how large its blocks are, and how many were written."""
    from upscalers.banks.listing import list_bank

    listed = list_bank(model, memory)
    if json_:
        print(json.dumps(listed))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("level", "nodes", "parameters of a block", "written", "generic", "on the disk")
    for level in listed["levels"]:
        table.add_row(
            str(level["level"]),
            f"{level['nodes']:,}",
            f"{level['parameters']:,}",
            f"{len(level['written']):,}",
            "written" if level["generic"] else "not written",
            f"{level['bytes_on_disk'] / 1e6:,.1f} MB",
        )
    console = Console()
    console.print(
        f"{listed['memory']} ({listed['type']}): a text fetches {listed['fetched']:,} of {listed['bank']:,} parameters"
    )
    console.print(table)


@app.command()
def delete(
    model: Model,
    output: Output,
    node: Nodes = None,
    subtree: Subtree = False,
    memory: Memory = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Take what blocks have learned away; they add zero, as if they had never been written."""
    from upscalers.banks import editing

    _show(editing.delete(editing.BankRequest(model, output, memory, overwrite), node or [], subtree), json_)


@app.command()
def export(
    model: Model,
    output: Annotated[str, typer.Option(help="File of blocks to make.", metavar="FILE")],
    node: Nodes = None,
    subtree: Subtree = False,
    memory: Memory = None,
    json_: Json = False,
) -> None:
    """Write blocks to a file of their own."""
    from upscalers.banks import editing

    _show(editing.export(model, node or [], output, subtree, memory), json_)


@app.command("import")
def import_(
    model: Model,
    file: Annotated[Path, typer.Option("--from", help="File that export wrote.", metavar="FILE")],
    output: Output,
    memory: Memory = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Put the blocks of a file in their places."""
    from upscalers.banks import editing

    _show(editing.import_blocks(editing.BankRequest(model, output, memory, overwrite), file), json_)


@app.command()
def merge(
    model: Annotated[str, typer.Argument(help="The checkpoint that all runs began from.", metavar="DIR")],
    runs: Annotated[list[str], typer.Argument(help="Folders of trained models.", metavar="RUN...")],
    output: Output,
    memory: Memory = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Give a model the blocks of runs that trained different parts of the tree."""
    from upscalers.banks.editing import BankRequest
    from upscalers.banks.merging import merge as merge_runs

    _show(merge_runs(BankRequest(model, output, memory, overwrite), runs), json_)


@app.command()
def audit(
    model: Model,
    block: Annotated[
        list[str] | None,
        typer.Option(help="LEVEL:NODE, or LEVEL:generic: its documents; repeat at will.", metavar="NODE"),
    ] = None,
    subtree: Subtree = False,
    documents: Annotated[bool, typer.Option("--documents", help="By document, of all blocks.")] = False,
    memory: Memory = None,
    json_: Json = False,
) -> None:
    """Show what has trained blocks, of a bank that a run with audit: true has trained: by block, or by document."""
    from upscalers.banks.audit import audit as told_of

    told = told_of(model, block or [], subtree, documents, memory)
    if json_:
        print(json.dumps(told))
        return
    from rich.console import Console
    from rich.table import Table

    if "blocks" in told:
        table = Table("block", "documents", "sequences", "tokens", "")
        for each in told["blocks"]:
            numbers = (f"{each[name]:,}" for name in ("documents", "sequences", "tokens"))
            remark = "deleted" if each["deleted"] else "" if each["whole"] else "and what was not recorded"
            table.add_row(each["block"], *numbers, remark)
    else:
        table = Table("file", "line", "id", "block", "sequences", "tokens", "")
        for each in told["documents"]:
            for of in each["blocks"]:
                document = (each["file"], str(each["line"]), each["id"] or "", of["block"])
                table.add_row(
                    *document, f"{of['sequences']:,}", f"{of['tokens']:,}", "deleted" if of["deleted"] else ""
                )
    Console().print(table)


def _show(done: dict[str, Any], json_: bool) -> None:
    if json_:
        print(json.dumps(done))
    else:
        print(f"{done['output']}: {done['command']} of {len(done['blocks']):,} blocks of {done['memory']}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command, and exit unless it is done; one line on standard error says what is wrong."""
    status = run_command(app, arguments, "midus-bank", interruption="interrupted; nothing was written")
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
