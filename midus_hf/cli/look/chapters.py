"""The `midus-chapters` command."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from midus_hf.cli.exit_status import run_command
from midus_hf.cli.look import looking
from upscalers.request.errors import RequestError

app = typer.Typer(
    name="midus-chapters",
    help="List and edit the chapters of a checkpoint's memory, and look at what they do. stats, ablate and nearest run the model, "
    "the others load none; the checkpoint that is read stays as it is.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(help="A checkpoint with chapters, made by upscale.", metavar="DIR")]
Chapters = Annotated[str, typer.Option(help="Their numbers, such as 3,7-9.", metavar="LIST")]
Output = Annotated[str, typer.Option(help="Folder to make.", metavar="DIR2")]
Memory = Annotated[
    str | None, typer.Option(help="One of several memories of chapters.  [default: the only one]", metavar="NAME")
]
OneOfBanks = Annotated[int | None, typer.Option(help="One of several banks.  [default: all]", metavar="N")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what upscale or this command wrote there.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


@app.command("list")
def list_(
    model: Model,
    memory: Annotated[
        str | None, typer.Option(help="One of several memories of chapters.  [default: all]", metavar="NAME")
    ] = None,
    bank: OneOfBanks = None,
    json_: Json = False,
) -> None:
    """Show each bank, its chapters, how long their rows are, and the routers' biases for them."""
    from upscalers.chapters.listing import list_chapters
    from upscalers.console import Console

    listed = list_chapters(model, memory, bank, Console("midus-chapters"))
    if json_:
        print(json.dumps(listed))
    else:
        from upscalers.chapters.tables import print_chapters

        print_chapters(listed)


@app.command()
def zero(
    model: Model,
    chapters: Chapters,
    output: Output,
    memory: Memory = None,
    bank: OneOfBanks = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Set the rows of chapters to zero; routers still open them."""
    from upscalers.chapters import editing

    _show(editing.zero(_request(model, output, memory, bank, overwrite), chapters), json_)


@app.command()
def swap(
    model: Model,
    chapters: Annotated[str, typer.Option(help="The two, such as 3,7.", metavar="LIST")],
    output: Output,
    with_router: Annotated[
        bool, typer.Option("--with-router", help="Swap what routers have for them as well.")
    ] = False,
    memory: Memory = None,
    bank: OneOfBanks = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Exchange the rows of two chapters."""
    from upscalers.chapters import editing

    _show(editing.swap(_request(model, output, memory, bank, overwrite), chapters, with_router), json_)


@app.command()
def prune(
    model: Model,
    chapters: Chapters,
    output: Output,
    memory: Memory = None,
    bank: OneOfBanks = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Take chapters out, with what routers have for them; those behind move up."""
    from upscalers.chapters import editing

    _show(editing.prune(_request(model, output, memory, bank, overwrite), chapters), json_)


@app.command()
def quantise(
    model: Model,
    output: Output,
    bits: Annotated[int, typer.Option(help="Of each integer: 8 or 4.", metavar="N")] = 8,
    memory: Memory = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Round all banks to integers with a scale per row; they take less room and no longer train."""
    from upscalers.chapters.quantising import quantise as quantise_banks

    _show(quantise_banks(_request(model, output, memory, None, overwrite), bits), json_)


@app.command()
def export(
    model: Model,
    chapters: Chapters,
    output: Annotated[str, typer.Option(help="File to make, which ends in .safetensors.", metavar="FILE")],
    memory: Memory = None,
    bank: Annotated[
        int | None, typer.Option(help="One of several banks.  [default: the only one]", metavar="N")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file of chapters.")] = False,
    json_: Json = False,
) -> None:
    """Write chapters, and what routers have for them, into one file."""
    from upscalers.chapters.exporting import export as export_chapters

    _show(export_chapters(model, chapters, output, memory, bank, overwrite), json_)


@app.command("import")
def import_(
    model: Model,
    file: Annotated[Path, typer.Argument(help="What export wrote.", metavar="FILE")],
    output: Output,
    into: Annotated[
        str | None,
        typer.Option(help="The places of its chapters, such as 3,4.  [default: the numbers they had]", metavar="LIST"),
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="Put them behind the model's own chapters.")] = False,
    memory: Memory = None,
    bank: OneOfBanks = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Put the chapters of a file into a checkpoint, in the place of others or as new ones."""
    from upscalers.chapters import editing

    _show(editing.import_file(_request(model, output, memory, bank, overwrite), file, into, append), json_)


app.command()(looking.stats)
app.command()(looking.ablate)
app.command()(looking.nearest)


def _request(model: str, output: str, memory: str | None, bank: int | None, overwrite: bool) -> Any:
    from upscalers.chapters.checkpoint_edit import EditRequest
    from upscalers.console import Console

    return EditRequest(model, output, memory, bank, overwrite, Console("midus-chapters"))


def _show(result: dict[str, Any], json_: bool) -> None:
    if json_:
        print(json.dumps(result))
    else:
        from upscalers.chapters.tables import print_edit

        print_edit(result)


def main() -> None:
    """Run the command, and exit with its status, also if that is 0; every error is one line on standard error."""
    status = run_command(
        app,
        None,
        "midus-chapters",
        refusals=(RequestError,),
        hint=" See 'midus-chapters --help'.",
        failure="failed: ",
        interruption="interrupted; nothing is left of the output.",
    )
    sys.exit(status)
