"""`midus look depth`: what attention reads of earlier layers."""

from pathlib import Path
from typing import Annotated

import typer

from midus_hf.cli.reading import (
    Json,
    Loading,
    ReadingInBatches,
    check_picture,
    model_argument,
    show_report,
    sizes_of,
    token_bar,
    working,
)

_MOST_WRITERS = 10
"""That are shown on a terminal; JSON and the page have all."""


def depth(
    model: Annotated[str, model_argument("Folder or hub id of a model whose heads read the depth (moda).")],
    text: Annotated[str, typer.Option(help="The file or folder to read.", metavar="PATH")],
    *,
    reading: ReadingInBatches,
    loading: Loading,
    memory: Annotated[
        str | None, typer.Option(help="One of several memories that read the depth.  [default: all]", metavar="NAME")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Those that read, such as 3,7-9.  [default: all]", metavar="LIST")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Their numbers, such as 0,4-5.  [default: all]", metavar="LIST")
    ] = None,
    map_: Annotated[
        str | None,
        typer.Option("--map", help="Draw what each token of a row reads in this head.", metavar="LAYER:HEAD"),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw maps of layers and heads (.png).  [default: none]", metavar="FILE")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write tables and maps (.html).  [default: none]", metavar="FILE")
    ] = None,
    json_: Json = False,
) -> None:
    """Let a model read a text, and say what share of attention goes to the depth, and which earlier layers are read."""
    with working():
        place = _place(map_)
        check_picture("picture", picture, ".png")
        check_picture("page", page, ".html")
        if place is not None and picture is None and page is None:
            raise ValueError(f"map is {map_!r}, and nothing to draw it on; expected --picture or --page as well.")
        documents = reading.documents_at(text)
        from midus_hf.analysis.depth.map import depth_map
        from midus_hf.analysis.depth.readers import readers_of_depth
        from midus_hf.analysis.depth.reading import depth_readings, writers
        from midus_hf.analysis.depth.records import record_depth
        from midus_hf.analysis.text_rows import read_texts
        from upscalers.chapters.numbers import parse_numbers

        loaded, tokenizer = loading.load(model)
        config = loaded.config.get_text_config()
        of_layers = None if layers is None else parse_numbers(layers, config.num_hidden_layers, "layers")
        of_heads = None if heads is None else parse_numbers(heads, config.num_attention_heads, "heads")
        readers_of_depth(loaded, memory, of_layers)
        (rows,) = reading.rows(loaded, tokenizer, {text: documents})
        of_head = None if place is None else depth_map(loaded, rows.rows[0], *place, memory)
        recording = record_depth(loaded, memory, layers=of_layers, heads=of_heads)
        with token_bar() as show, recording as records:
            losses = read_texts(loaded, [rows], batch_size=reading.batch_size, progress=show)[text]
        readings = depth_readings(records)
        found = writers(readings)
    from midus_hf.analysis.depth.report import as_json, layers_table, writers_table

    report = {
        "model": model,
        "text": {"path": text, **sizes_of(rows), "loss": losses.mean},
        **as_json(readings, found),
    }
    show_report(report, [layers_table(readings), writers_table(found, _MOST_WRITERS)], json_)
    if picture is not None:  # last, so that a picture that cannot be written costs nothing else
        from midus_hf.analysis.depth.pictures import depth_parts, draw_parts

        picture.write_bytes(draw_parts(depth_parts(readings, of_head).values()))
    if page is not None:
        from midus_hf.analysis.depth.report import write_depth_page

        write_depth_page(page, report, readings, found, of_head)


def _place(given: str | None) -> tuple[int, int] | None:
    """The layer and the head whose map is to be drawn."""
    if given is None:
        return None
    layer, colon, head = given.partition(":")
    if not (colon and layer.isdecimal() and head.isdecimal()):
        raise ValueError(f"map is {given!r}; expected LAYER:HEAD, such as 3:0.")
    return int(layer), int(head)
