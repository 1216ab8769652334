"""`midus-analyze page`: what layers, drift, values and blocks tell of a model, on one page."""

from pathlib import Path
from typing import Annotated

import typer

from midus_commands.inside import Model, in_words, load_with_base, usage_of_slots
from midus_commands.reading import (
    BatchSize,
    Column,
    Device,
    Dtype,
    Encoding,
    Limit,
    MaxTokens,
    Retriever,
    SequenceLength,
    Texts,
    adding,
    check_picture,
    named_documents,
    rows_of,
    token_bar,
    working,
)

_MOST_SLOTS = 3
"""Of each memory, that are told."""


def page(
    model: Model,
    text: Texts,
    output: Annotated[Path, typer.Option(help="The page to write (.html).", metavar="FILE")],
    base: Annotated[
        str, typer.Option(help="As for drift: self, or folder or hub id of the base.", metavar="BASE")
    ] = "self",
    column: Column = "text",
    encoding: Encoding = "utf-8",
    limit: Limit = None,
    sequence_length: SequenceLength = None,
    max_tokens: MaxTokens = None,
    batch_size: BatchSize = 4,
    retriever: Retriever = None,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Write one page: what is lost without each part, how far predictions moved, what slots hold, and which blocks are fetched."""
    with working():
        check_picture("output", output, ".html")
        documents = named_documents(text, column, encoding, limit)
        loaded, tokenizer, of_base = load_with_base(model, base, dtype, device)
        from midus_hf.analysis import drift, inside_page
        from midus_hf.analysis.block_usage import bank_layouts, usage_by_rows
        from midus_hf.analysis.layer_effects import layer_effects
        from midus_hf.analysis.slot_tokens import memories_of_slots, slot_tokens, slots_table

        rows = rows_of(loaded, tokenizer, documents, sequence_length, max_tokens, retriever)
        with token_bar() as show:
            effects = layer_effects(loaded, rows, batch_size=batch_size, progress=show)
        total = sum(of_text.num_tokens for of_text in rows)
        with token_bar() as show:
            moved = drift.drift(loaded, of_base, rows, batch_size=batch_size, progress=adding(show, total))
        hosts, values = memories_of_slots(loaded), []
        if hosts:
            usage = usage_of_slots(loaded, rows, batch_size)
            for hosted in hosts:
                near = slot_tokens(loaded, tokenizer, hosted.layer, usage=usage, most=_MOST_SLOTS, memory=hosted.name)
                values.append(slots_table(near, hosted.place))
    compared = {"model": model, "base": in_words(base)}
    fetched = {
        of_text.name: usage_by_rows(bank_layouts(loaded), of_text) for of_text in rows if of_text.paths is not None
    }
    inside_page.write_inside_page(output, compared, effects, moved, values, fetched, tokenizer)
