"""`midus edit`: change what the memories of a checkpoint hold: chapters, or blocks of a bank."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.reading import Json, sharing_options
from midus_hf.cli.subjects import Subjects
from upscalers.request.errors import RequestError

if TYPE_CHECKING:
    from upscalers.banks.editing import BankRequest
    from upscalers.chapters.checkpoint_edit import EditRequest

# Edits that `midus edit` makes.
EDITS: Subjects[Callable[["Edit"], None]] = Subjects("edit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """Options of an edit. Each edit takes some of them."""

    model: Annotated[Path, typer.Argument(help="A checkpoint that upscale made; it stays as it is.", metavar="DIR")]
    file: Annotated[Path | None, typer.Argument(help="File to import, which export wrote.", metavar="[FILE]")] = None
    output: Annotated[Path | None, typer.Option(help="Folder, or file of export, to make.", metavar="PATH")] = None
    chapters: Annotated[str | None, typer.Option(help="Chapters by number, such as 3,7-9.", metavar="LIST")] = None
    node: Annotated[
        list[str] | None, typer.Option(help="Block, LEVEL:NODE or LEVEL:generic; may be repeated.", metavar="NODE")
    ] = None
    subtree: Annotated[bool, typer.Option("--subtree", help="Blocks of all nodes below as well.")] = False
    memory: Annotated[
        str | None, typer.Option(help="One of several memories.  [default: all, or the only one]", metavar="NAME")
    ] = None
    bank: Annotated[
        int | None, typer.Option(help="One of several banks.  [default: all, or the only one]", metavar="N")
    ] = None
    with_router: Annotated[bool, typer.Option("--with-router", help="Swap rows of routers as well.")] = False
    bits: Annotated[int, typer.Option(help="Bits of quantised rows: 8 or 4.", metavar="N")] = 8
    into: Annotated[
        str | None, typer.Option(help="Numbers of imported chapters.  [default: those they had]", metavar="LIST")
    ] = None
    append: Annotated[bool, typer.Option("--append", help="Import behind the model's own chapters.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what upscale or this command wrote.")] = False
    json_: Json = False

    def of_chapters(self) -> "EditRequest":
        """Return the request of an edit of chapters. Its progress is shown on a terminal."""
        from upscalers.chapters.checkpoint_edit import EditRequest
        from upscalers.console import Console

        assert self.output is not None
        console = Console("midus edit")
        return EditRequest(str(self.model), str(self.output), self.memory, self.bank, self.overwrite, console)

    def of_blocks(self) -> "BankRequest":
        """Return the request of an edit of blocks."""
        from upscalers.banks.editing import BankRequest

        assert self.output is not None
        return BankRequest(str(self.model), str(self.output), self.memory, self.overwrite)

    def show_chapters(self, result: dict[str, Any]) -> None:
        """Print the result of an edit of chapters."""
        if self.json_:
            print(json.dumps(result))
        else:
            from upscalers.chapters.tables import print_edit

            print_edit(result)

    def show_blocks(self, result: dict[str, Any]) -> None:
        """Print the result of an edit of blocks."""
        if self.json_:
            print(json.dumps(result))
        else:
            print(f"{result['output']}: {result['command']} of {len(result['blocks']):,} blocks of {result['memory']}")


_WRITES = ("output", "memory", "overwrite")
_CHANGES_CHAPTERS = (*_WRITES, "chapters", "bank")
app = command_line()


@EDITS.register("list", "show banks, their chapters, and the routers' biases", ("memory", "bank"))
def list_chapters(edit: Edit) -> None:
    """Show each bank, its chapters, how long their rows are, and the routers' biases for the chapters."""
    from upscalers.chapters import listing
    from upscalers.console import Console

    listed = listing.list_chapters(str(edit.model), edit.memory, edit.bank, Console("midus edit"))
    if edit.json_:
        print(json.dumps(listed))
    else:
        from upscalers.chapters.tables import print_chapters

        print_chapters(listed)


@EDITS.register("zero", "set rows of chapters to zero", _CHANGES_CHAPTERS, ("chapters", "output"))
def zero(edit: Edit) -> None:
    """Set the rows of chapters to zero; routers still open them."""
    from upscalers.chapters import editing

    edit.show_chapters(editing.zero(edit.of_chapters(), _text(edit.chapters)))


@EDITS.register(
    "swap", "exchange the rows of two chapters", (*_CHANGES_CHAPTERS, "with_router"), ("chapters", "output")
)
def swap(edit: Edit) -> None:
    """Exchange the rows of two chapters."""
    from upscalers.chapters import editing

    edit.show_chapters(editing.swap(edit.of_chapters(), _text(edit.chapters), edit.with_router))


@EDITS.register("prune", "take chapters out; later chapters move up", _CHANGES_CHAPTERS, ("chapters", "output"))
def prune(edit: Edit) -> None:
    """Take chapters out, with the routers' rows for them; later chapters move up."""
    from upscalers.chapters import editing

    edit.show_chapters(editing.prune(edit.of_chapters(), _text(edit.chapters)))


@EDITS.register("quantise", "round banks of chapters to integers", (*_WRITES, "bits"), ("output",))
def quantise(edit: Edit) -> None:
    """Round all banks of chapters to integers with a scale per row. Quantised banks need less room, and do not train."""
    from upscalers.chapters import quantising

    edit.show_chapters(quantising.quantise(edit.of_chapters(), edit.bits))


@EDITS.register("delete", "delete what blocks have learned", (*_WRITES, "node", "subtree"), ("node", "output"))
def delete(edit: Edit) -> None:
    """Delete what blocks have learned. Deleted blocks add zero, like blocks that were never written."""
    from upscalers.banks import editing

    edit.show_blocks(editing.delete(edit.of_blocks(), edit.node or [], edit.subtree))


@EDITS.register("export", "write chapters or blocks to a file", (*_CHANGES_CHAPTERS, "node", "subtree"), ("output",))
def export(edit: Edit) -> None:
    """Write chapters with the routers' rows for them, or blocks, to a file."""
    if (edit.chapters is None) == (edit.node is None):
        raise RequestError("--chapters and --node are both given or both missing; expected one of them.")
    if edit.chapters is None:
        from upscalers.banks import editing

        _refuse(edit, "blocks", "bank", "overwrite")
        edit.show_blocks(editing.export(str(edit.model), edit.node or [], str(edit.output), edit.subtree, edit.memory))
    else:
        from upscalers.chapters import exporting

        _refuse(edit, "chapters", "subtree")
        exported = exporting.export(
            str(edit.model), edit.chapters, str(edit.output), edit.memory, edit.bank, edit.overwrite
        )
        edit.show_chapters(exported)


@EDITS.register(
    "import", "put chapters or blocks from a file in", (*_WRITES, "file", "bank", "into", "append"), ("file", "output")
)
def import_file(edit: Edit) -> None:
    """Put the chapters or blocks of a file into a checkpoint. They replace the checkpoint's; chapters may also be appended."""
    from midus_hf.config.fetched_blocks import BANKS_FOLDER
    from upscalers.chapters.chapter_file import is_chapter_file

    assert edit.file is not None
    if (edit.model / BANKS_FOLDER).is_dir() and not is_chapter_file(edit.file):
        from upscalers.banks import editing

        _refuse(edit, "blocks", "bank", "into", "append")
        edit.show_blocks(editing.import_blocks(edit.of_blocks(), edit.file))
    else:
        from upscalers.chapters import editing as of_chapters

        edit.show_chapters(of_chapters.import_file(edit.of_chapters(), edit.file, edit.into, edit.append))


def _text(option: str | None) -> str:
    assert option is not None, "the edit needs it"
    return option


def _refuse(edit: Edit, kind: str, *options: str) -> None:
    """Refuse options that apply to the other kind of memory only.

    Raises:
        RequestError: If one of them is given.
    """
    for option in options:
        if getattr(edit, option) not in (None, False):
            raise RequestError(f"--{option} is given, which is not for {kind}; leave it out.")


@EDITS.command(app, "Change what the memories of a checkpoint hold: chapters, or blocks of a bank.")
@sharing_options
def edit(context: typer.Context, name: EDITS.argument(), *, edit: Edit) -> None:  # type: ignore[valid-type]
    """Change a checkpoint's memories, and write the result to a new folder or file."""
    try:
        EDITS.check_options(context, name, Edit, always=("model", "json_"))
    except ValueError as error:
        raise RequestError(str(error)) from error
    EDITS.by_name[name].work(edit)


main = partial(
    run_command,
    app,
    name="midus edit",
    refusals=(RequestError,),
    interruption="interrupted; nothing is left of the output.",
)
