"""What `midus-analyze` tells of a model and what was added to it: `layers`, `drift` and `values`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midus_hf.cli.reading import (
    BatchSize,
    Column,
    Device,
    Dtype,
    Encoding,
    Json,
    Limit,
    MaxTokens,
    Retriever,
    SequenceLength,
    Texts,
    adding,
    check_file,
    check_picture,
    load_to_read,
    named_documents,
    rows_of,
    show_report,
    token_bar,
    working,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from midus_hf.analysis.inside.drift import LogitsOfBase
    from midus_hf.analysis.slots.usage import Usage
    from midus_hf.analysis.text_rows import TextRows

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
    retriever: Retriever = None,
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
        from midus_hf.analysis.inside.added_parts import added_parts
        from midus_hf.analysis.inside.layer_effects import layer_effects

        loaded, tokenizer = load_to_read(model, dtype, device)
        added_parts(loaded)
        rows = rows_of(loaded, tokenizer, documents, sequence_length, max_tokens, retriever)
        with token_bar() as show:
            found = layer_effects(loaded, rows, with_base=all_, batch_size=batch_size, progress=show)
    from midus_hf.analysis.inside.layer_report import as_csv, as_json, draw_layers, layers_table

    show_report({"model": model, **as_json(found)}, [layers_table(found)], json_)
    if csv is not None:
        csv.write_text(as_csv(found), encoding="utf-8")
    if picture is not None:
        picture.write_bytes(draw_layers(found))


def drift(
    model: Model,
    text: Texts,
    base: Annotated[
        str,
        typer.Option(
            help="Folder or hub id of the base, or self: the model with all that was added switched off.",
            metavar="BASE",
        ),
    ] = "self",
    column: Column = "text",
    encoding: Encoding = "utf-8",
    limit: Limit = None,
    sequence_length: SequenceLength = None,
    max_tokens: MaxTokens = None,
    batch_size: BatchSize = 4,
    retriever: Retriever = None,
    top: Annotated[int, typer.Option(help="Rows to show of each text, those that moved farthest.", metavar="N")] = 5,
    page: Annotated[
        Path | None, typer.Option(help="Write these rows, coloured (.html).  [default: none]", metavar="FILE")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    json_: Json = False,
) -> None:
    """Measure how far what a model predicts of texts moved from its base: divergence, first choices, loss, and where most."""
    with working():
        check_file("page", page, ".html")
        if top < 1:
            raise ValueError(f"top is {top}; expected at least 1.")
        documents = named_documents(text, column, encoding, limit)
        loaded, tokenizer, of_base = load_with_base(model, base, dtype, device)
        from midus_hf.analysis.inside import drift as found_drift

        rows = rows_of(loaded, tokenizer, documents, sequence_length, max_tokens, retriever)
        with token_bar() as show:
            told = adding(show, sum(of_text.num_tokens for of_text in rows))
            found = found_drift.drift(loaded, of_base, rows, most_shown=top, batch_size=batch_size, progress=told)
    from midus_hf.analysis.inside.drift_report import as_json, drift_table, moved_table, write_drift_page

    compared = {"model": model, "base": base}
    tables = [drift_table(found), moved_table(found, tokenizer)]
    show_report({**compared, "texts": as_json(found, tokenizer)}, tables, json_)
    if page is not None:
        write_drift_page(page, {**compared, "base": in_words(base)}, found, tokenizer)


def values(
    model: Model,
    layer: Annotated[int, typer.Option(help="Index of the decoder layer.", metavar="N")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A file or folder: its most used slots are shown. May be given again.  [default: none]",
            metavar="NAME=PATH",
        ),
    ] = None,
    slot: Annotated[
        str | None, typer.Option(help="Their numbers, such as 3,7-9.  [default: the most used ones]", metavar="LIST")
    ] = None,
    head: Annotated[int | None, typer.Option(help="One of several.  [default: all]", metavar="N")] = None,
    most: Annotated[int, typer.Option(help="Slots to show, if they are not named.", metavar="N")] = 10,
    top: Annotated[int, typer.Option(help="Tokens per slot.", metavar="N")] = 10,
    column: Column = "text",
    encoding: Encoding = "utf-8",
    limit: Limit = None,
    sequence_length: SequenceLength = None,
    max_tokens: MaxTokens = None,
    batch_size: BatchSize = 4,
    memory: Annotated[
        str | None, typer.Option(help="One of several memories of the layer.  [default: the only one]", metavar="NAME")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    json_: Json = False,
) -> None:
    """Show the tokens nearest to what slots of a memory add, read through the model's own head: a probe, and no proof."""
    with working():
        if not text and slot is None:
            raise ValueError(
                "neither text nor slot is given; expected one: slots by number, or a text to see which are used."
            )
        documents = named_documents(text or [], column, encoding, limit)
        from midus_hf.analysis.slots.slot_tokens import memory_of_slots, slot_tokens, slots_table
        from upscalers.chapters.numbers import parse_numbers

        loaded, tokenizer = load_to_read(model, dtype, device)
        hosted = memory_of_slots(loaded, layer, memory)
        numbers = None if slot is None else parse_numbers(slot, hosted.module.num_slots, "slot")
        usage = None
        if documents:
            rows = rows_of(loaded, tokenizer, documents, sequence_length, max_tokens)
            usage = usage_of_slots(loaded, rows, batch_size)
        found = slot_tokens(
            loaded, tokenizer, layer, head=head, slots=numbers, usage=usage, most=most, top=top, memory=memory
        )
    report = {
        "model": model,
        "layer": layer,
        "memory": hosted.name,
        "slots": [dataclasses.asdict(of_slot) for of_slot in found],
    }
    show_report(report, [slots_table(found, hosted.place)], json_)


def load_with_base(
    model: str, base: str, dtype: str, device: str | None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, LogitsOfBase]":
    """A model, its tokenizer, and what gives the logits of its base.

    Args:
        model: Folder or hub id.
        base: Likewise, or `"self"`: the model with all that was added switched off.
        dtype: As `load_to_read` takes it.
        device: Likewise.

    Raises:
        ValueError: If one cannot be loaded, or the base is not in the model, or reads text as other tokens.
    """
    if base == "self":
        _check_base_within(model)
    from midus_hf.analysis.inside.drift import base_within

    loaded, tokenizer = load_to_read(model, dtype, device)
    of_base = base_within(loaded) if base == "self" else _load_other(base, loaded, tokenizer, dtype, device)
    return loaded, tokenizer, of_base


def in_words(base: str) -> str:
    """A base as a page names it."""
    return "its base, which is the model without what was added" if base == "self" else base


def usage_of_slots(model: "PreTrainedModel", rows: "Sequence[TextRows]", batch_size: int) -> "Usage":
    """Let a model read texts, and count which slots of its memories it reads."""
    from midus_hf.analysis.slots.usage import record_usage
    from midus_hf.analysis.text_rows import read_rows

    with token_bar() as show, record_usage(model) as usage:
        told = adding(show, sum(of_text.num_tokens for of_text in rows))
        for of_text in rows:
            read_rows(model, of_text, batch_size=batch_size, progress=told)
    return usage


def _check_base_within(model: str) -> None:
    """See that a model without what was added is its base: its weights are those that the record has a digest of.

    Raises:
        ValueError: If they are not, or nobody knows.
    """
    from upscalers.request.errors import RequestError
    from upscalers.runs.base_confirmation import keeps_base

    try:
        kept = keeps_base(model)
    except RequestError as error:
        raise ValueError(str(error)) from error
    if not kept:
        why = (
            "are not those that it was upscaled from: trained since, or cast"
            if kept is False
            else "are of no known base"
        )
        raise ValueError(
            f"base is 'self', but the base's weights in {model!r} {why}; expected the base itself. Give its folder as base."
        )


def _load_other(
    name: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", dtype: str, device: str | None
) -> "LogitsOfBase":
    """The base as a model of its own, of the same tokens.

    Raises:
        ValueError: If it cannot be loaded, or reads text as other tokens.
    """
    from midus_hf.analysis.inside.drift import other_base

    base, of_base = load_to_read(name, dtype, device, "base")
    if of_base.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"base is {name!r}, whose tokenizer has other tokens than the model's; expected one tokenizer."
        )
    return other_base(model, base)
