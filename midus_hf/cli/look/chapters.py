"""`midus look chapters|ablate|nearest`: which chapters a text reads, what it loses without them, and what they hold."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midus_hf.cli.edit.options import Memory
from midus_hf.cli.reading import (
    Json,
    Loading,
    ReadingInBatches,
    Texts,
    check_matplotlib,
    model_argument,
    show_report,
    sizes_of,
    token_bar,
    working,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RunModel = Annotated[str, model_argument("Folder or hub id of a model with chapters.")]
OfLayers = Annotated[str | None, typer.Option(help="Their numbers, such as 3,7-9.  [default: all]", metavar="LIST")]
OfChapters = Annotated[str, typer.Option(help="all, or their numbers, such as 3,7-9.", metavar="LIST")]
Pictures = Annotated[
    Path | None,
    typer.Option(help="Folder to make, with pictures and report.html.  [default: none]", metavar="DIR"),
]

_MOST_LAYERS = 3
"""Whose typical chapters are shown on a terminal; JSON and the page have those of all."""


def chapters(
    model: RunModel,
    text: Texts,
    *,
    reading: ReadingInBatches,
    loading: Loading,
    memory: Annotated[
        str | None, typer.Option(help="One of several memories of chapters.  [default: all]", metavar="NAME")
    ] = None,
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
