"""`midus edit chapters`: list and edit the chapters of a checkpoint's memory."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midus_hf.cli.command_line import command_line
from midus_hf.cli.edit.options import Memory, Model, Output, Overwrite
from midus_hf.cli.reading import Json, sharing_options

if TYPE_CHECKING:
    from upscalers.chapters.checkpoint_edit import EditRequest

app = command_line("List and edit the chapters of a checkpoint's memory.")

Chapters = Annotated[str, typer.Option(help="Their numbers, such as 3,7-9.", metavar="LIST")]
OneOfBanks = Annotated[int | None, typer.Option(help="One of several banks.  [default: all]", metavar="N")]


@dataclasses.dataclass(frozen=True)
class Edit:
    """What is made of which checkpoint: options that the commands share which edit chapters."""

    model: Model
    output: Output
    memory: Memory = None
    bank: OneOfBanks = None
    overwrite: Overwrite = False

    def request(self) -> "EditRequest":
        """Return the request of an edit whose steps are shown on a terminal."""
        from upscalers.chapters.checkpoint_edit import EditRequest
        from upscalers.console import Console

        return EditRequest(
            self.model, self.output, self.memory, self.bank, self.overwrite, Console("midus edit chapters")
        )


@app.command("list")
def list_(
    model: Model,
    memory: Annotated[
        str | None, typer.Option(help="One of several memories.  [default: all]", metavar="NAME")
    ] = None,
    bank: OneOfBanks = None,
    json_: Json = False,
) -> None:
    """Show each bank, its chapters, how long their rows are, and the routers' biases for them."""
    from upscalers.chapters.listing import list_chapters
    from upscalers.console import Console

    listed = list_chapters(model, memory, bank, Console("midus edit chapters"))
    if json_:
        print(json.dumps(listed))
    else:
        from upscalers.chapters.tables import print_chapters

        print_chapters(listed)


@app.command()
@sharing_options
def zero(chapters: Chapters, *, edit: Edit, json_: Json = False) -> None:
    """Set the rows of chapters to zero; routers still open them."""
    from upscalers.chapters import editing

    _show(editing.zero(edit.request(), chapters), json_)


@app.command()
@sharing_options
def swap(
    chapters: Annotated[str, typer.Option(help="The two, such as 3,7.", metavar="LIST")],
    *,
    with_router: Annotated[
        bool, typer.Option("--with-router", help="Swap what routers have for them as well.")
    ] = False,
    edit: Edit,
    json_: Json = False,
) -> None:
    """Exchange the rows of two chapters."""
    from upscalers.chapters import editing

    _show(editing.swap(edit.request(), chapters, with_router), json_)


@app.command()
@sharing_options
def prune(chapters: Chapters, *, edit: Edit, json_: Json = False) -> None:
    """Take chapters out, with what routers have for them; those behind move up."""
    from upscalers.chapters import editing

    _show(editing.prune(edit.request(), chapters), json_)


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

    _show(quantise_banks(Edit(model, output, memory, overwrite=overwrite).request(), bits), json_)


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
@sharing_options
def import_(
    edit: Edit,
    file: Annotated[Path, typer.Argument(help="What export wrote.", metavar="FILE")],
    *,
    into: Annotated[
        str | None,
        typer.Option(help="The places of its chapters, such as 3,4.  [default: the numbers they had]", metavar="LIST"),
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="Put them behind the model's own chapters.")] = False,
    json_: Json = False,
) -> None:
    """Put the chapters of a file into a checkpoint, in the place of others or as new ones."""
    from upscalers.chapters import editing

    _show(editing.import_file(edit.request(), file, into, append), json_)


def _show(result: dict[str, Any], json_: bool) -> None:
    if json_:
        print(json.dumps(result))
    else:
        from upscalers.chapters.tables import print_edit

        print_edit(result)
