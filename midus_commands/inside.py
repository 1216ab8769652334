"""What `midus-analyze` tells of a model and what was added to it: `layers`."""

from pathlib import Path
from typing import Annotated

import typer

from midus_commands.reading import (
    BatchSize,
    Column,
    Device,
    Dtype,
    Encoding,
    Json,
    Limit,
    MaxTokens,
    SequenceLength,
    Texts,
    check_file,
    check_picture,
    load_to_read,
    named_documents,
    rows_of,
    show_report,
    token_bar,
    working,
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id of a model that upscale made.")]


def layers(
    model: Model,
    text: Texts,
    all_: Annotated[bool, typer.Option("--all", help="Leave out each layer of the base as well.")] = False,
    column: Column = "text",
    encoding: Encoding = "utf-8",
    limit: Limit = None,
    sequence_length: SequenceLength = None,
    max_tokens: MaxTokens = None,
    batch_size: BatchSize = 4,
    picture: Annotated[
        Path | None, typer.Option(help="Draw a bar per part (.png).  [default: none]", metavar="FILE")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write a line per part and text (.csv).  [default: none]", metavar="FILE")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    json_: Json = False,
) -> None:
    """Measure what texts lose without each layer, memory and reading of the depth that was added, and without all of them."""
    with working():
        check_picture("picture", picture, ".png")
        check_file("csv", csv, ".csv")
        documents = named_documents(text, column, encoding, limit)
        from midus_hf.analysis.added_parts import added_parts
        from midus_hf.analysis.layer_effects import layer_effects

        loaded, tokenizer = load_to_read(model, dtype, device)
        added_parts(loaded)
        rows = rows_of(loaded, tokenizer, documents, sequence_length, max_tokens)
        with token_bar() as show:
            found = layer_effects(loaded, rows, with_base=all_, batch_size=batch_size, progress=show)
    from midus_hf.analysis.layer_report import as_csv, as_json, draw_layers, layers_table

    show_report({"model": model, **as_json(found)}, [layers_table(found)], json_)
    if csv is not None:
        csv.write_text(as_csv(found), encoding="utf-8")
    if picture is not None:
        picture.write_bytes(draw_layers(found))
