"""`midus edit`: change what the memories of a checkpoint hold: chapters, or blocks of a bank."""

import dataclasses
from functools import partial
from typing import Annotated, Any

import typer

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.options import Json, argument, flag, option, options_of, show, show_tables
from midus_hf.config.wording import first_few

Model = Annotated[str, argument("A checkpoint that upscale made; it stays as it is.", "DIR")]
Chapters = Annotated[str, option("Chapters by number, such as 3,7-9.", "LIST")]
Memory = Annotated[str | None, option("One of several memories.  [default: all, or the only one]", "NAME")]

app = command_line("Change what the memories of a checkpoint hold: chapters, or blocks of a bank.")


@dataclasses.dataclass(kw_only=True)
class _Edit:
    """Options of every edit."""

    model: Model
    output: Annotated[str, option("Folder to make.", "PATH")]
    memory: Memory = None
    overwrite: Annotated[bool, flag("--overwrite", "Replace what upscale or this command wrote.")] = False


@app.command("list")
def list_(model: Model, memory: Memory = None, json_: Json = False) -> None:
    """Show chapters, and the routers' biases."""
    from upscalers.console import Console
    from upscalers.edits.listing import list_chapters, print_chapters

    show(list_chapters(model, memory, Console("midus edit")), json_, print_chapters)


@app.command()
def blocks(model: Model, memory: Memory = None, json_: Json = False) -> None:
    """Show the levels of banks, how large their blocks are, and how many were written."""
    from upscalers.edits.banks import list_banks

    show(list_banks(model, memory), json_, _print_blocks)


@app.command()
@options_of(_Edit)
def zero(context: typer.Context, *, options: dict[str, Any], chapters: Chapters, json_: Json = False) -> None:
    """Set rows of chapters to zero; routers still open them."""
    from upscalers.edits import chapters as edits

    _show_edit(edits.zero(_request(options), chapters), json_)


@app.command()
@options_of(_Edit)
def prune(context: typer.Context, *, options: dict[str, Any], chapters: Chapters, json_: Json = False) -> None:
    """Take chapters out; later chapters move up."""
    from upscalers.edits import chapters as edits

    _show_edit(edits.prune(_request(options), chapters), json_)


@app.command()
@options_of(_Edit)
def quantise(
    context: typer.Context,
    *,
    options: dict[str, Any],
    bits: Annotated[int, option("Bits of quantised rows: 8 or 4.", "N")] = 8,
    json_: Json = False,
) -> None:
    """Round banks of chapters to integers with a scale per row. Quantised banks need less room, and do not train."""
    from upscalers.edits import chapters as edits

    _show_edit(edits.quantise(_request(options), bits), json_)


@app.command()
@options_of(_Edit)
def delete(
    context: typer.Context,
    *,
    options: dict[str, Any],
    node: Annotated[list[str], option("Block, LEVEL:NODE or LEVEL:generic; may be repeated.", "NODE")],
    subtree: Annotated[bool, flag("--subtree", "Blocks of all nodes below as well.")] = False,
    json_: Json = False,
) -> None:
    """Delete what blocks have learned, in every bank. Deleted blocks add zero, like blocks that were never written.

    The tree of topics loses the centroids of nodes without a block at or below them, so that no text is assigned to these.
    """
    from upscalers.edits import banks

    result = banks.delete(_request(options), node, subtree)
    deleted = [f"{len(blocks):,} blocks of {name}" for name, blocks in result["banks"].items()]
    centroids = result["centroids"] or {}
    lines = [f"{result['output']}: deleted {' and '.join(deleted)}"]
    if centroids.get("deleted"):
        lines.append(
            f"deleted the centroids of {first_few(centroids['deleted'])} and all below: no text is assigned to them"
        )
    if centroids.get("kept"):
        lines.append(f"kept the centroids of {first_few(centroids['kept'])}, by which texts find other blocks")
    show(result, json_, lambda _: print("\n".join(lines)))


def _request(options: dict[str, Any]) -> Any:
    """Return the request of an edit, whose progress is shown on a terminal."""
    from upscalers.console import Console
    from upscalers.edits.checkpoint_edit import EditRequest

    return EditRequest(**options, progress=Console("midus edit"))


def _print_blocks(listed: dict[str, Any]) -> None:
    from midus_hf.look.page import TableOfWords

    head = ["level", "nodes", "parameters of a block", "written", "deleted", "generic", "on the disk"]
    for bank in listed["banks"]:
        print(f"{bank['memory']} ({bank['type']}): a text fetches {bank['fetched']:,} of {bank['bank']:,} parameters")
        rows = [
            [
                str(level["level"]),
                f"{level['nodes']:,}",
                f"{level['parameters']:,}",
                f"{len(level['written']):,}",
                f"{len(level['deleted']):,}",
                "written" if level["generic"] else "not written",
                f"{level['bytes_on_disk'] / 1e6:,.1f} MB",
            ]
            for level in bank["levels"]
        ]
        show_tables([TableOfWords("", head, rows)])
    if len(listed["banks"]) > 1:
        print(f"all banks: a text fetches {listed['fetched']:,} of {listed['bank']:,} parameters")


def _show_edit(result: dict[str, Any], json_: bool) -> None:
    from upscalers.edits.listing import print_edit

    show(result, json_, print_edit)


main = partial(run_command, app, name="midus edit")
