"""The `midus bank` command."""

from functools import partial
from typing import Annotated, Any

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.options import Json, argument, flag, option, show

Model = Annotated[str, argument("A checkpoint that upscale made.", "DIR")]
Memory = Annotated[str | None, option("One of several memories.  [default: the only one]", "NAME")]

app = command_line(
    "List the blocks of a checkpoint's bank, merge the blocks that several runs trained, and show which documents trained them."
)


@app.command("list")
def list_(model: Model, memory: Memory = None, json_: Json = False) -> None:
    """Show each level, how large its blocks are, and how many were written."""
    from upscalers.banks.listing import list_bank

    show(list_bank(model, memory), json_, _print_bank)


def _print_bank(listed: dict[str, Any]) -> None:
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
def merge(
    model: Annotated[str, argument("The checkpoint that all runs began from.", "DIR")],
    runs: Annotated[list[str], argument("Folders of trained models.", "RUN...")],
    output: Annotated[str, option("Folder to make.", "DIR2")],
    memory: Memory = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace what upscale or midus edit wrote.")] = False,
    json_: Json = False,
) -> None:
    """Merge the blocks of runs that trained different parts of the tree into one model."""
    from upscalers.banks.editing import BankRequest
    from upscalers.banks.merging import merge as merge_runs

    merged = merge_runs(BankRequest(model, output, memory, overwrite), runs)
    line = f"{merged['output']}: merge of {len(merged['blocks']):,} blocks of {merged['memory']}"
    show(merged, json_, lambda _: print(line))


@app.command()
def audit(
    model: Model,
    node: Annotated[
        list[str] | None, option("List documents of this block, LEVEL:NODE or LEVEL:generic; may be repeated.", "NODE")
    ] = None,
    subtree: Annotated[bool, flag("--subtree", "Blocks of all nodes below as well.")] = False,
    documents: Annotated[bool, flag("--documents", "List documents of all blocks.")] = False,
    memory: Memory = None,
    json_: Json = False,
) -> None:
    """Show which documents have trained which blocks. The training run must have had audit: true."""
    from upscalers.banks.listing import audit as audit_of

    show(audit_of(model, node or [], subtree, documents, memory), json_, _print_audit)


def _print_audit(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    if "blocks" in report:
        table = Table("block", "documents", "sequences", "tokens", "")
        for each in report["blocks"]:
            numbers = (f"{each[name]:,}" for name in ("documents", "sequences", "tokens"))
            remark = "deleted" if each["deleted"] else "" if each["whole"] else "and what was not recorded"
            table.add_row(each["block"], *numbers, remark)
    else:
        table = Table("file", "line", "id", "block", "sequences", "tokens", "")
        for each in report["documents"]:
            for block in each["blocks"]:
                document = (each["file"], str(each["line"]), each["id"] or "", block["block"])
                table.add_row(
                    *document, f"{block['sequences']:,}", f"{block['tokens']:,}", "deleted" if block["deleted"] else ""
                )
    Console().print(table)


main = partial(run_command, app, name="midus bank", interruption="interrupted; nothing was written")
