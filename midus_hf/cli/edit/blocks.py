"""`midus edit blocks`: delete, export and import what blocks of a checkpoint's bank have learned."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from midus_hf.cli.command_line import command_line
from midus_hf.cli.edit.options import Memory, Model, Output, Overwrite
from midus_hf.cli.reading import Json

app = command_line("Delete, export and import what blocks of a checkpoint's bank have learned.")

Nodes = Annotated[
    list[str] | None,
    typer.Option("--node", help="LEVEL:NODE, or LEVEL:generic; repeat at will.  [required]", metavar="NODE"),
]
Subtree = Annotated[bool, typer.Option("--subtree", help="And all nodes below.")]


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

    show(editing.delete(editing.BankRequest(model, output, memory, overwrite), node or [], subtree), json_)


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

    show(editing.export(model, node or [], output, subtree, memory), json_)


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

    show(editing.import_blocks(editing.BankRequest(model, output, memory, overwrite), file), json_)


def show(done: dict[str, Any], json_: bool) -> None:
    """Print what an edit of blocks has done: as JSON, or in one line."""
    if json_:
        print(json.dumps(done))
    else:
        print(f"{done['output']}: {done['command']} of {len(done['blocks']):,} blocks of {done['memory']}")
