"""`midus-analyze blocks`: which blocks of a model's bank texts fetch."""

from pathlib import Path
from typing import Annotated

import typer

from midus_hf.cli.look.inside import Model
from midus_hf.cli.reading import (
    Column,
    Device,
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
    sizes_of,
    working,
)


def blocks(
    model: Model,
    text: Texts,
    retriever: Annotated[str, typer.Option(help="Tree of topics by which texts fetch blocks.", metavar="TREE")],
    column: Column = "text",
    encoding: Encoding = "utf-8",
    limit: Limit = None,
    sequence_length: SequenceLength = None,
    max_tokens: MaxTokens = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw a curve per text and level (.png).  [default: none]", metavar="FILE")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write a line per text and block (.csv).  [default: none]", metavar="FILE")
    ] = None,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Say which blocks of a model's bank texts fetch, how evenly, and how many are never fetched."""
    with working():
        check_picture("picture", picture, ".png")
        check_file("csv", csv, ".csv")
        documents = named_documents(text, column, encoding, limit)
        from midus_hf.analysis.slots.block_usage import bank_layouts, usage_by_rows

        loaded, tokenizer = load_to_read(model, "auto", device)
        rows = rows_of(loaded, tokenizer, documents, sequence_length, max_tokens, retriever)
        found = {of_text.name: usage_by_rows(bank_layouts(loaded), of_text) for of_text in rows}
    from midus_hf.analysis.slots.report import as_csv, as_json, blocks_table, draw_blocks

    texts = {of_text.name: {**sizes_of(of_text), "blocks": as_json(found[of_text.name])} for of_text in rows}
    show_report({"model": model, "texts": texts}, [blocks_table(found)], json_)
    if csv is not None:
        csv.write_text(as_csv(found), encoding="utf-8")
    if picture is not None:
        picture.write_bytes(draw_blocks(found))
