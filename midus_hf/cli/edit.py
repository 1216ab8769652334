"""`midus edit`: change a checkpoint's memories: chapters, blocks of a bank, or a glossary."""

from functools import partial
from typing import Annotated, Any

import typer

from midus_hf.cli.command_line import Json, argument, cli_option, command_line, flag, run_command, show, show_tables
from midus_hf.config.errors import RequestError, first_few, format_count, print_note
from midus_hf.sources.names import check_sources


def _named_corpus(name: str) -> str:
    check_sources([("corpus", name)])
    return name


def _named_texts(name: str | None) -> str | None:
    check_sources([] if name is None else [("protect", name)])
    return name


Model = Annotated[str, argument("A checkpoint with memory; without --output its glossary is changed.", "DIR")]
Source = Annotated[str, argument("A checkpoint with memory; it is not changed.", "DIR")]
Chapters = Annotated[str, cli_option("Chapters by number, such as 3,7-9.", "LIST")]
Memory = Annotated[str | None, cli_option("One of several memories.  [default: all, or the only one]", "NAME")]

Output = Annotated[str, cli_option("Folder to make.", "PATH")]
OtherOutput = Annotated[
    str | None, cli_option("Folder to make.  [default for entries: change the model's glossary]", "PATH", "--output")
]
_ENTRIES = 'Rows {"name": ..., "text": ...}: a file, folder or Hub dataset.'
Entries = Annotated[str, cli_option(_ENTRIES, "CORPUS", callback=_named_corpus)]
CommonNames = Annotated[bool, flag("--common-names", "Allow names that are frequent words.")]
Protect = Annotated[
    str | None, cli_option("Texts that must not contain a name of any entry.", "TEXTS", callback=_named_texts)
]
Overwrite = Annotated[bool, flag("--overwrite", "Replace what upscale or this command wrote.")]

app = command_line("Change a memory's chapters, blocks of a bank, or a glossary.")


@app.command("list")
def list_(model: Source, memory: Memory = None, json_: Json = False) -> None:
    """Show entries of a glossary, or chapters with routers' biases."""
    from upscalers.console import print_memories

    show(list_memories(model, memory), json_, print_memories)


def list_memories(model: str, memory: str | None = None) -> dict[str, Any]:
    """List what a checkpoint's memories contain: entries of a glossary, and chapters."""
    from midus_hf.memories.moc.options import MocOptions
    from midus_hf.memories.packs.options import PacksOptions
    from upscalers.checkpoint.base_checkpoint import open_base
    from upscalers.checkpoint.source import resolve_source
    from upscalers.console import Console
    from upscalers.edits.chapters import list_chapters
    from upscalers.edits.packs import list_entries

    with resolve_source(model, config_only=True) as source:
        attached = open_base(source.folder, needs_weights=False).layout.memories.attached
    options = [entry.options for name, entry in attached.items() if memory in (None, name)]
    listed: dict[str, Any] = {}
    if any(isinstance(each, PacksOptions) for each in options):
        listed |= list_entries(model)
    if any(isinstance(each, MocOptions) for each in options):
        listed |= list_chapters(model, memory, Console("midus edit"))
    if not listed:
        named = "memory" if memory is None else f"memory {memory!r}"
        raise RequestError(
            f"{model} has no {named} of type 'packs' or 'moc', whose entries or chapters could be listed; its memories are: "
            f"{', '.join(attached) or 'none'}. midus edit blocks lists blocks of topics."
        )
    return listed


@app.command()
def blocks(model: Source, memory: Memory = None, json_: Json = False) -> None:
    """Show the levels of banks, and their blocks' size and number."""
    from upscalers.edits.banks import list_banks

    show(list_banks(model, memory), json_, _print_blocks)


def edit_chapters(
    context: typer.Context,
    model: Source,
    output: Output,
    chapters: Chapters,
    memory: Memory = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    from upscalers.edits import chapters as edits

    edit = {"zero": edits.zero, "prune": edits.prune}[str(context.command.name)]
    _show_edit(edit(_request(model, output, memory, overwrite), chapters), json_)


app.command("zero", help="Set rows of chapters to zero; routers still open them.")(edit_chapters)
app.command("prune", help="Remove chapters; later chapters move up.")(edit_chapters)


@app.command()
def delete(
    model: Model,
    output: OtherOutput = None,
    node: Annotated[
        list[str] | None, cli_option("Block of a bank, LEVEL:NODE or LEVEL:generic; may be repeated.", "NODE")
    ] = None,
    name: Annotated[list[str] | None, cli_option("Name of an entry of a glossary; may be repeated.", "NAME")] = None,
    memory: Memory = None,
    overwrite: Overwrite = False,
    subtree: Annotated[bool, flag("--subtree", "Blocks of all nodes below as well.")] = False,
    json_: Json = False,
) -> None:
    """Delete blocks of banks with what they learned, or entries.

    Blocks are deleted in every bank, entries of a glossary by their names. Deleted blocks add zero, like blocks that were never
    written. A text with a deleted name is computed as without the entry.

    The tree of topics loses the centroids of nodes without a block at or below them, so that no text is assigned to these.
    """
    from upscalers.edits import banks

    if bool(node) == bool(name) or (name and subtree):
        raise RequestError("expected either blocks (--node, perhaps with --subtree) or names of entries (--name).")
    if name:
        from upscalers.edits.packs import delete_entries

        _show_entries(delete_entries(_request(model, output, memory, overwrite), name), json_)
        return
    result = banks.delete(_request(model, output, memory, overwrite), node or [], subtree)
    deleted = [f"{format_count(len(blocks), 'block')} of {name}" for name, blocks in result["banks"].items()]
    centroids = result["centroids"] or {}
    lines = [f"{result['output']}: deleted {' and '.join(deleted)}"]
    if centroids.get("deleted"):
        lines.append(
            f"deleted the centroids of {first_few(centroids['deleted'])} and all below: no text is assigned to them"
        )
    if centroids.get("kept"):
        lines.append(f"kept the centroids of {first_few(centroids['kept'])}, which lead texts to other blocks")
    show(result, json_, lambda _: print("\n".join([*lines, *_describe_remains(result)])))


# Other blocks that were trained on texts of a deleted topic, and how to delete them.
_RELATED_BLOCKS = {
    "same": ("the topic's own blocks in other banks, {}", "leave out --memory"),
    "above": ("blocks above it, {}", "pass them to --node as well"),
    "below": ("blocks below it, {}", "--subtree"),
    "generic": (
        "the generic memory, {}",
        "--node 1:generic --subtree; a run with --generic_share 0 does not train it",
    ),
}


def _describe_remains(result: dict[str, Any]) -> list[str]:
    """Return a line for what else trained on deleted topics' texts, and how to delete that."""
    taught = result["also_taught"]
    lines = [
        f"also trained on its texts, and kept: {what.format(first_few(taught[where]))}; to delete: {remedy}"
        for where, (what, remedy) in _RELATED_BLOCKS.items()
        if taught[where]
    ]
    if taught["weights"]:
        lines.append(
            "also trained on its texts, and kept: other weights, which the run trained; there is no proof that they forgot"
        )
    else:
        is_known = taught["weights"] is not None
        said = (
            "its last run trained only blocks"
            if is_known
            else "not known, as no run or no upscaling is recorded there"
        )
        lines.append(f"other weights: {said}; upscale strip proves whether they are the base's, byte for byte")
    return [*lines, f"delete copies yourself: {', '.join(result['copies'])}, logs and backups"]


def edit_entries(
    context: typer.Context,
    model: Model,
    corpus: Entries,
    output: OtherOutput = None,
    common_names: CommonNames = False,
    protect: Protect = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    from upscalers.edits.packs import add_entries, replace_entries, sync_entries

    edit = {"add": add_entries, "replace": replace_entries, "sync": sync_entries}[str(context.command.name)]
    _show_entries(edit(_request(model, output, None, overwrite), corpus, common_names, protect), json_)


_ADD = (
    "Add entries to a glossary. A row has a name, or a list of names, and a text. In Python: "
    "model.glossary.add(names, text)."
)
app.command("add", help=_ADD)(edit_entries)
_REPLACE = (
    "Replace the texts of entries of a glossary. A row has one of an entry's names, perhaps new ones, and a text."
)
app.command("replace", help=_REPLACE)(edit_entries)
_SYNC = (
    "Make a glossary that of a file. Entries that the file lacks are deleted, others added or replaced. A row has a name, or a list "
    "of names, and a text."
)
app.command("sync", help=_SYNC)(edit_entries)


# Where the names of deleted entries still occur, and how to delete them there.
_REMAINS = {
    "texts": ("the texts of {}", "midus edit replace"),
    "names": ("other names, {}", "midus edit delete"),
    "files": ("{}, such as in the recorded name of a corpus", "edit these files"),
}


def _show_entries(result: dict[str, Any], json_: bool) -> None:
    """Print what an edit did to entries, and where their names and texts still are."""
    command = result["command"]
    done = {"add": "added", "replace": "replaced", "delete": "deleted"}
    kinds = {done[command]: result["entries"]} if command in done else {kind: result[kind] for kind in done.values()}
    lines = [
        f"{result['output']}: {kind} {format_count(len(entries), 'entry')}: {first_few([' / '.join(each) for each in entries])}"
        for kind, entries in kinds.items()
        if entries
    ] or [f"{result['output']}: the glossary is that of the corpus already"]
    for line in result["remarks"]:
        print_note(line)
    if "remains" in result:
        lines += [
            f"their names still occur in {where.format(first_few(result['remains'][key]))}; to delete: {remedy}"
            for key, (where, remedy) in _REMAINS.items()
            if result["remains"][key]
        ]
        if result["copies"]:
            lines.append(f"their texts are still in {', '.join(result['copies'])}; to delete: edit or remove them")
        places = " and ".join(result["searched"])
        lines.append(
            f"not searched for their texts: folders other than {places}, compressed files, logs, backups, the Hub"
        )
    show(result, json_, lambda _: print("\n".join(lines)))


def _request(model: str, output: str | None, memory: str | None, overwrite: bool) -> Any:
    from upscalers.console import Console
    from upscalers.edits.checkpoint_edit import EditRequest

    return EditRequest(model=model, output=output, memory=memory, overwrite=overwrite, progress=Console("midus edit"))


def _print_blocks(listed: dict[str, Any]) -> None:
    """Print a table for each bank: the number and size of each level's blocks."""
    from midus_hf.look.page import TextTable

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
        show_tables([TextTable("", head, rows)])
    if len(listed["banks"]) > 1:
        print(f"all banks: a text fetches {listed['fetched']:,} of {listed['bank']:,} parameters")


def _show_edit(result: dict[str, Any], json_: bool) -> None:
    from upscalers.console import print_edit

    show(result, json_, print_edit)


main = partial(run_command, app, name="midus edit")
