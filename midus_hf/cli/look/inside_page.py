"""`midus-analyze page`: what layers, drift, values and blocks tell of a model, on one page."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midus_hf.cli.look.inside import Model, in_words, load_with_base
from midus_hf.cli.reading import (
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

if TYPE_CHECKING:
    import torch

    from midus_hf.analysis.inside.drift import LogitsOfBase
    from midus_hf.analysis.slots.usage import Usage

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
        from tqdm import tqdm

        from midus_hf.analysis.inside import drift
        from midus_hf.analysis.inside.drift_report import write_inside_page
        from midus_hf.analysis.inside.layer_effects import layer_effects
        from midus_hf.analysis.slots.block_usage import bank_layouts, usage_by_rows
        from midus_hf.analysis.slots.slot_tokens import memories_of_slots, slot_tokens, slots_table
        from midus_hf.analysis.slots.usage import record_usage

        rows = rows_of(loaded, tokenizer, documents, sequence_length, max_tokens, retriever)
        with token_bar("layers") as show:
            effects = layer_effects(loaded, rows, batch_size=batch_size, progress=show)
        total = sum(of_text.num_tokens for of_text in rows)
        hosts, values = memories_of_slots(loaded), []
        with token_bar("drift") as show, record_usage(loaded) if hosts else contextlib.nullcontext() as usage:
            told = adding(show, total)
            apart = of_base if usage is None else _uncounted(of_base, usage)
            moved = drift.drift(loaded, apart, rows, batch_size=batch_size, progress=told)
        for hosted in tqdm(hosts, desc="slots", unit=" memories", disable=None):
            near = slot_tokens(loaded, tokenizer, hosted.layer, usage=usage, most=_MOST_SLOTS, memory=hosted.name)
            values.append(slots_table(near, hosted.place))
    compared = {"model": model, "base": in_words(base)}
    fetched = {
        of_text.name: usage_by_rows(bank_layouts(loaded), of_text) for of_text in rows if of_text.paths is not None
    }
    write_inside_page(output, compared, effects, moved, values, fetched, tokenizer)


def _uncounted(of_base: "LogitsOfBase", usage: "Usage") -> "LogitsOfBase":
    """The same, without counting the slots that the base reads, where it has memories of its own."""

    def logits(rows: "Sequence[torch.Tensor]") -> "torch.Tensor":
        with usage.paused():
            return of_base(rows)

    return logits
