"""`midus edit`: change what the memories of a checkpoint hold: chapters, or blocks of a bank."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.options import Json, Subject, Subjects, argument, flag, option, sharing_options, show
from upscalers.request.errors import refusing_requests

if TYPE_CHECKING:
    from upscalers.edits.banks import BankRequest
    from upscalers.edits.checkpoint_edit import EditRequest

_WRITES = ("output", "memory", "overwrite")
_CHANGES_CHAPTERS = (*_WRITES, "chapters", "bank")
_NEEDS_CHAPTERS = ("chapters", "output")
# Edits that `midus edit` makes. The function of the same name behind `edit_` makes each.
EDITS = Subjects(
    "edit",
    {
        "list": Subject("show banks, their chapters, and the routers' biases", ("memory", "bank")),
        "zero": Subject("set rows of chapters to zero", _CHANGES_CHAPTERS, _NEEDS_CHAPTERS),
        "prune": Subject("take chapters out; later chapters move up", _CHANGES_CHAPTERS, _NEEDS_CHAPTERS),
        "quantise": Subject("round banks of chapters to integers", (*_WRITES, "bits"), ("output",)),
        "delete": Subject(
            "delete what blocks have learned, in every bank", (*_WRITES, "node", "subtree"), ("node", "output")
        ),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """Options of an edit. Each edit takes some of them."""

    model: Annotated[Path, argument("A checkpoint that upscale made; it stays as it is.", "DIR")]
    output: Annotated[Path | None, option("Folder to make.", "PATH")] = None
    chapters: Annotated[str | None, option("Chapters by number, such as 3,7-9.", "LIST")] = None
    node: Annotated[list[str] | None, option("Block, LEVEL:NODE or LEVEL:generic; may be repeated.", "NODE")] = None
    subtree: Annotated[bool, flag("--subtree", "Blocks of all nodes below as well.")] = False
    memory: Annotated[str | None, option("One of several memories.  [default: all, or the only one]", "NAME")] = None
    bank: Annotated[int | None, option("One of several banks.  [default: all, or the only one]", "N")] = None
    bits: Annotated[int, option("Bits of quantised rows: 8 or 4.", "N")] = 8
    overwrite: Annotated[bool, flag("--overwrite", "Replace what upscale or this command wrote.")] = False
    json_: Json = False

    def of_chapters(self) -> "EditRequest":
        """Return the request of an edit of chapters. Its progress is shown on a terminal."""
        from upscalers.console import Console
        from upscalers.edits.checkpoint_edit import EditRequest

        assert self.output is not None
        console = Console("midus edit")
        return EditRequest(str(self.model), str(self.output), self.memory, self.bank, self.overwrite, console)

    def of_blocks(self) -> "BankRequest":
        """Return the request of an edit of blocks."""
        from upscalers.edits.banks import BankRequest

        assert self.output is not None
        return BankRequest(str(self.model), str(self.output), self.memory, self.overwrite)

    def show_chapters(self, result: dict[str, Any]) -> None:
        """Print the result of an edit of chapters."""
        from upscalers.edits.tables import print_edit

        show(result, self.json_, print_edit)

    def show_blocks(self, result: dict[str, Any]) -> None:
        """Print the result of an edit of blocks."""
        parts = [f"{len(blocks):,} blocks of {memory}" for memory, blocks in result["banks"].items()]
        show(result, self.json_, lambda _: print(f"{result['output']}: deleted {' and '.join(parts)}"))


app = command_line()


def edit_list(edit: Edit) -> None:
    """Show each bank, its chapters, how long their rows are, and the routers' biases for the chapters."""
    from upscalers.console import Console
    from upscalers.edits import listing
    from upscalers.edits.tables import print_chapters

    show(
        listing.list_chapters(str(edit.model), edit.memory, edit.bank, Console("midus edit")),
        edit.json_,
        print_chapters,
    )


def edit_zero(edit: Edit) -> None:
    """Set the rows of chapters to zero; routers still open them."""
    from upscalers.edits import chapters

    edit.show_chapters(chapters.zero(edit.of_chapters(), _text(edit.chapters)))


def edit_prune(edit: Edit) -> None:
    """Take chapters out, with the routers' rows for them; later chapters move up."""
    from upscalers.edits import chapters

    edit.show_chapters(chapters.prune(edit.of_chapters(), _text(edit.chapters)))


def edit_quantise(edit: Edit) -> None:
    """Round all banks of chapters to integers with a scale per row. Quantised banks need less room, and do not train."""
    from upscalers.edits import quantising

    edit.show_chapters(quantising.quantise(edit.of_chapters(), edit.bits))


def edit_delete(edit: Edit) -> None:
    """Delete what blocks have learned. Deleted blocks add zero, like blocks that were never written."""
    from upscalers.edits import banks

    edit.show_blocks(banks.delete(edit.of_blocks(), edit.node or [], edit.subtree))


def _text(option: str | None) -> str:
    assert option is not None, "the edit needs it"
    return option


@EDITS.command(app, "Change what the memories of a checkpoint hold: chapters, or blocks of a bank.")
@sharing_options
def edit(context: typer.Context, name: EDITS.argument(), *, edit: Edit) -> None:  # type: ignore[valid-type]
    """Change a checkpoint's memories, and write the result to a new folder or file."""
    with refusing_requests():
        EDITS.check_options(context, name, Edit, always=("model", "json_"))
    globals()[f"edit_{name}"](edit)


main = partial(run_command, app, name="midus edit")
