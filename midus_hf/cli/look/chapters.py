"""The `midus-chapters` command."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midus_hf.cli.exit_status import run_command
from midus_hf.cli.reading import (
    Json,
    Loading,
    ReadingInBatches,
    Texts,
    check_matplotlib,
    sharing_options,
    show_report,
    sizes_of,
    token_bar,
    working,
)
from upscalers.request.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from upscalers.chapters.checkpoint_edit import EditRequest

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
RunModel = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id of a model with chapters.")]
OfLayers = Annotated[str | None, typer.Option(help="Their numbers, such as 3,7-9.  [default: all]", metavar="LIST")]
OfChapters = Annotated[str, typer.Option(help="all, or their numbers, such as 3,7-9.", metavar="LIST")]
AnyMemory = Annotated[
    str | None, typer.Option(help="One of several memories of chapters.  [default: all]", metavar="NAME")
]
Pictures = Annotated[
    Path | None,
    typer.Option(help="Folder to make, with pictures and report.html.  [default: none]", metavar="DIR"),
]


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

        return EditRequest(self.model, self.output, self.memory, self.bank, self.overwrite, Console("midus-chapters"))


_MOST_LAYERS = 3
"""Whose typical chapters are shown on a terminal; JSON and the page have those of all."""


@app.command("list")
def list_(
    model: Model,
    memory: AnyMemory = None,
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


@app.command()
@sharing_options
def stats(
    model: RunModel,
    text: Texts,
    *,
    reading: ReadingInBatches,
    loading: Loading,
    memory: AnyMemory = None,
    output: Pictures = None,
    json_: Json = False,
) -> None:
    """Let the model read texts, and say which chapters are read, how evenly and steadily, and for which text."""
    with working():
        _check_pictures(output)
        documents = reading.documents(text)
        from midus_hf.analysis.chapters.memories import memories_of_chapters
        from midus_hf.analysis.chapters.records import record_chapters
        from midus_hf.analysis.chapters.stats import chapter_stats
        from midus_hf.analysis.text_rows import read_texts

        loaded, tokenizer = loading.load(model)
        memories_of_chapters(loaded, memory)
        rows = reading.rows(loaded, tokenizer, documents)
        with token_bar() as show, record_chapters(loaded, memory) as records:
            losses = read_texts(loaded, rows, batch_size=reading.batch_size, records=records, progress=show)
        found = chapter_stats(records)
    report = {
        "model": model,
        "texts": {of_text.name: {**sizes_of(of_text), "loss": losses[of_text.name].mean} for of_text in rows},
        "layers": [dataclasses.asdict(of_layer) for of_layer in found],
    }
    from midus_hf.analysis.chapters.tables import reading_table, typical_table

    show_report(report, [reading_table(found), typical_table(found, _MOST_LAYERS)], json_)
    if output is not None:  # last, so that a picture that cannot be written costs nothing else
        from midus_hf.analysis.chapters.report import write_stats

        write_stats(output, report, found)


@app.command()
@sharing_options
def ablate(
    model: RunModel,
    text: Texts,
    *,
    chapters: OfChapters = "all",
    layers: OfLayers = None,
    mode: Annotated[
        str, typer.Option(help="zero their rows, swap-random with others, or drop them from routers.", metavar="NAME")
    ] = "zero",
    top: Annotated[
        int | None, typer.Option(help="Try the most read ones of them alone.  [default: all]", metavar="N")
    ] = None,
    reading: ReadingInBatches,
    loading: Loading,
    memory: Memory = None,
    seed: Annotated[int, typer.Option(help="Of the choice for swap-random.", metavar="N")] = 0,
    output: Pictures = None,
    json_: Json = False,
) -> None:
    """Measure what each text loses without each chapter: the loss without it, minus the loss as it is."""
    with working():
        _check_pictures(output)
        documents = reading.documents(text)
        from midus_hf.analysis.chapters import ablation as chapter_ablation

        loaded, tokenizer = loading.load(model)
        numbers, of_layers = _numbers(loaded, memory, chapters, layers)
        rows = reading.rows(loaded, tokenizer, documents)
        with token_bar() as show:
            ablation = chapter_ablation.ablate(
                loaded,
                rows,
                chapters=numbers,
                layers=of_layers,
                mode=mode,  # type: ignore[arg-type]  # which it checks
                top=top,
                memory=memory,
                batch_size=reading.batch_size,
                seed=seed,
                progress=show,
            )
    found = dataclasses.asdict(ablation)
    report = {
        "model": model,
        "texts": {of_text.name: {**sizes_of(of_text), "loss": ablation.losses[of_text.name]} for of_text in rows},
        **{key: found[key] for key in ("mode", "memory", "layers", "chapters")},
    }
    from midus_hf.analysis.chapters.tables import ablation_table

    show_report(report, [ablation_table(ablation)], json_)
    if output is not None:
        from midus_hf.analysis.chapters.report import write_ablation

        write_ablation(output, report, ablation)


@app.command()
@sharing_options
def nearest(
    model: RunModel,
    *,
    chapters: OfChapters = "all",
    layers: OfLayers = None,
    top: Annotated[int, typer.Option(help="Tokens per chapter.", metavar="N")] = 10,
    rows: Annotated[bool, typer.Option("--rows", help="Tell those of each row of a chapter as well.")] = False,
    loading: Loading,
    memory: Memory = None,
    json_: Json = False,
) -> None:
    """Show the tokens nearest to what chapters hold, read through the model's own head: a probe, and no proof."""
    with working():
        from midus_hf.analysis.chapters.tokens import nearest_tokens

        loaded, tokenizer = loading.load(model)
        numbers, of_layers = _numbers(loaded, memory, chapters, layers)
        near = nearest_tokens(
            loaded, tokenizer, chapters=numbers, layers=of_layers, top=top, each_row=rows, memory=memory
        )
    report = {"model": model, "chapters": [dataclasses.asdict(of_chapter) for of_chapter in near]}
    from midus_hf.analysis.chapters.tables import nearest_table

    show_report(report, [nearest_table(near)], json_)


def _show(result: dict[str, Any], json_: bool) -> None:
    if json_:
        print(json.dumps(result))
    else:
        from upscalers.chapters.tables import print_edit

        print_edit(result)


def _check_pictures(folder: Path | None) -> None:
    """See that a folder of pictures can be written.

    Raises:
        ValueError: If it is there and not empty, or matplotlib is not installed.
    """
    if folder is None:
        return
    check_matplotlib("output is a folder of pictures, which need")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"output is {str(folder)!r}, which exists and is no empty folder; name another.")


def _numbers(
    model: "PreTrainedModel", memory: str | None, chapters: str, layers: str | None
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The chapters and layers that are meant; None for all of them."""
    from midus_hf.analysis.chapters.memories import one_memory
    from upscalers.chapters.numbers import parse_numbers

    hosts = one_memory(model, memory)
    num_layers = model.config.get_text_config().num_hidden_layers
    return (
        None if chapters == "all" else parse_numbers(chapters, hosts[0].module.num_chapters),
        None if layers is None else parse_numbers(layers, num_layers, "layers"),
    )


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
