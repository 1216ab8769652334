"""`midus look heads|layers|drift|values|blocks|page`: what the parts of a model do, hold and change."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midus_hf.cli.command_line import WRONG_REQUEST, Ending
from midus_hf.cli.reading import (
    Device,
    Json,
    Loading,
    Reading,
    ReadingInBatches,
    Retriever,
    TaskData,
    TaskFiles,
    TaskLimit,
    Texts,
    check_file,
    check_picture,
    model_argument,
    show_report,
    sizes_of,
    token_bar,
    working,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from midus_hf.analysis.inside.drift import LogitsOfBase
    from midus_hf.analysis.slots.usage import Usage

Model = Annotated[str, model_argument("Folder or hub id of a model that upscale made.")]

_MOST_SLOTS = 3
"""Of each memory, that a page tells."""


def heads(
    models: Annotated[
        list[str],
        model_argument("Folders or hub ids: a base, and what was made of it.", "MODEL..."),
    ],
    tasks: Annotated[str, typer.Option(help="Of lm-eval, separated by commas.", metavar="NAMES")],
    *,
    data: TaskData = None,
    include_path: TaskFiles = None,
    limit: TaskLimit = None,
    signed: Annotated[
        bool,
        typer.Option(
            "--signed",
            help="Sums that may cancel, as in equation 20.  [default: absolute values]",
        ),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw maps of layers and heads (.png).  [default: none]", metavar="FILE")
    ] = None,
    loading: Loading,
    json_: Json = False,
) -> None:
    """Say how much each head of attention matters for the right answers of tasks, and how much heads of a layer differ in that."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; expected at least 1.")
    check_picture("picture", picture, ".png")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    try:
        with working():
            from tqdm import tqdm

            from midus_hf.analysis.inside.head_importance import HeadImportance, head_importance, task_answers
            from midus_hf.evaluation.harness import Tasks
            from midus_hf.evaluation.quiet import quiet_libraries

            found: dict[str, HeadImportance] = {}
            with quiet_libraries():
                asked = Tasks(names, data=data, include_path=include_path)
                for model in models:
                    loaded, tokenizer = loading.load(model)
                    answers = list(task_answers(loaded, tokenizer, asked, limit))
                    with tqdm(desc=model, total=len(answers), unit=" answers", disable=None) as bar:
                        found[model] = head_importance(loaded, answers, bar.update)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("lm_eval", "datasets"):
            raise
        words = f"tasks need lm-evaluation-harness ({error.name} is missing): pip install 'midus-hf[eval]'"
        raise Ending(WRONG_REQUEST, words) from error
    from midus_hf.analysis.inside.head_report import as_json, draw_heads, layers_table
    from midus_hf.short_names import short_names

    report = {"tasks": names, "limit": limit, "models": as_json(found)}
    labelled = dict(zip(short_names(list(found)), found.values(), strict=True))
    show_report(report, [layers_table(label, one, not signed) for label, one in labelled.items()], json_)
    if picture is not None:
        picture.write_bytes(draw_heads(labelled, not signed))


def layers(
    model: Model,
    text: Texts,
    *,
    all_: Annotated[bool, typer.Option("--all", help="Leave out each layer of the base as well.")] = False,
    reading: ReadingInBatches,
    retriever: Retriever = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw a bar per part (.png).  [default: none]", metavar="FILE")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write a line per part and text (.csv).  [default: none]", metavar="FILE")
    ] = None,
    loading: Loading,
    json_: Json = False,
) -> None:
    """Measure what texts lose without each layer, memory and reading of the depth that was added, and without all of them."""
    with working():
        check_picture("picture", picture, ".png")
        check_file("csv", csv, ".csv")
        documents = reading.documents(text)
        from midus_hf.analysis.inside.added_parts import added_parts
        from midus_hf.analysis.inside.layer_effects import layer_effects

        loaded, tokenizer = loading.load(model)
        added_parts(loaded)
        rows = reading.rows(loaded, tokenizer, documents, retriever)
        with token_bar() as show:
            found = layer_effects(loaded, rows, with_base=all_, batch_size=reading.batch_size, progress=show)
    from midus_hf.analysis.inside.layer_report import as_csv, as_json, draw_layers, layers_table

    show_report({"model": model, **as_json(found)}, [layers_table(found)], json_)
    if csv is not None:
        csv.write_text(as_csv(found), encoding="utf-8")
    if picture is not None:
        picture.write_bytes(draw_layers(found))


def drift(
    model: Model,
    text: Texts,
    *,
    base: Annotated[
        str,
        typer.Option(
            help="Folder or hub id of the base, or self: the model with all that was added switched off.",
            metavar="BASE",
        ),
    ] = "self",
    reading: ReadingInBatches,
    retriever: Retriever = None,
    top: Annotated[int, typer.Option(help="Rows to show of each text, those that moved farthest.", metavar="N")] = 5,
    page: Annotated[
        Path | None, typer.Option(help="Write these rows, coloured (.html).  [default: none]", metavar="FILE")
    ] = None,
    loading: Loading,
    json_: Json = False,
) -> None:
    """Measure how far what a model predicts of texts moved from its base: divergence, first choices, loss, and where most."""
    with working():
        check_file("page", page, ".html")
        if top < 1:
            raise ValueError(f"top is {top}; expected at least 1.")
        documents = reading.documents(text)
        loaded, tokenizer, of_base = _load_with_base(model, base, loading)
        from midus_hf.analysis.inside import drift as found_drift
        from midus_hf.analysis.text_rows import adding

        rows = reading.rows(loaded, tokenizer, documents, retriever)
        with token_bar() as show:
            told = adding(show, sum(of_text.num_tokens for of_text in rows))
            found = found_drift.drift(
                loaded, of_base, rows, most_shown=top, batch_size=reading.batch_size, progress=told
            )
    from midus_hf.analysis.inside.drift_report import as_json, drift_table, moved_table, write_drift_page

    compared = {"model": model, "base": base}
    tables = [drift_table(found), moved_table(found, tokenizer)]
    show_report({**compared, "texts": as_json(found, tokenizer)}, tables, json_)
    if page is not None:
        write_drift_page(page, {**compared, "base": _in_words(base)}, found, tokenizer)


def values(
    model: Model,
    layer: Annotated[int, typer.Option(help="Index of the decoder layer.", metavar="N")],
    *,
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
    reading: ReadingInBatches,
    memory: Annotated[
        str | None, typer.Option(help="One of several memories of the layer.  [default: the only one]", metavar="NAME")
    ] = None,
    loading: Loading,
    json_: Json = False,
) -> None:
    """Show the tokens nearest to what slots of a memory add, read through the model's own head: a probe, and no proof."""
    with working():
        if not text and slot is None:
            raise ValueError(
                "neither text nor slot is given; expected one: slots by number, or a text to see which are used."
            )
        documents = reading.documents(text or [])
        from midus_hf.analysis.slots.slot_tokens import memory_of_slots, slot_tokens, slots_table
        from midus_hf.analysis.slots.usage import record_usage
        from midus_hf.analysis.text_rows import read_texts
        from upscalers.chapters.numbers import parse_numbers

        loaded, tokenizer = loading.load(model)
        hosted = memory_of_slots(loaded, layer, memory)
        numbers = None if slot is None else parse_numbers(slot, hosted.module.num_slots, "slot")
        usage = None
        if documents:
            rows = reading.rows(loaded, tokenizer, documents)
            with token_bar() as show, record_usage(loaded) as usage:
                read_texts(loaded, rows, batch_size=reading.batch_size, progress=show)
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


def blocks(
    model: Model,
    text: Texts,
    retriever: Annotated[str, typer.Option(help="Tree of topics by which texts fetch blocks.", metavar="TREE")],
    *,
    reading: Reading,
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
        documents = reading.documents(text)
        from midus_hf.analysis.slots.block_usage import bank_layouts, usage_by_rows

        loaded, tokenizer = Loading(device=device).load(model)
        rows = reading.rows(loaded, tokenizer, documents, retriever)
        found = {of_text.name: usage_by_rows(bank_layouts(loaded), of_text) for of_text in rows}
    from midus_hf.analysis.slots.report import as_csv, as_json, blocks_table, draw_blocks

    texts = {of_text.name: {**sizes_of(of_text), "blocks": as_json(found[of_text.name])} for of_text in rows}
    show_report({"model": model, "texts": texts}, [blocks_table(found)], json_)
    if csv is not None:
        csv.write_text(as_csv(found), encoding="utf-8")
    if picture is not None:
        picture.write_bytes(draw_blocks(found))


def page(
    model: Model,
    text: Texts,
    output: Annotated[Path, typer.Option(help="The page to write (.html).", metavar="FILE")],
    *,
    base: Annotated[
        str, typer.Option(help="As for drift: self, or folder or hub id of the base.", metavar="BASE")
    ] = "self",
    reading: ReadingInBatches,
    retriever: Retriever = None,
    loading: Loading,
) -> None:
    """Write one page: what is lost without each part, how far predictions moved, what slots hold, and which blocks are fetched."""
    with working():
        check_picture("output", output, ".html")
        documents = reading.documents(text)
        loaded, tokenizer, of_base = _load_with_base(model, base, loading)
        from tqdm import tqdm

        from midus_hf.analysis.inside import drift
        from midus_hf.analysis.inside.drift_report import write_inside_page
        from midus_hf.analysis.inside.layer_effects import layer_effects
        from midus_hf.analysis.slots.block_usage import bank_layouts, usage_by_rows
        from midus_hf.analysis.slots.slot_tokens import memories_of_slots, slot_tokens, slots_table
        from midus_hf.analysis.slots.usage import record_usage
        from midus_hf.analysis.text_rows import adding

        rows = reading.rows(loaded, tokenizer, documents, retriever)
        with token_bar("layers") as show:
            effects = layer_effects(loaded, rows, batch_size=reading.batch_size, progress=show)
        total = sum(of_text.num_tokens for of_text in rows)
        hosts, values = memories_of_slots(loaded), []
        with token_bar("drift") as show, record_usage(loaded) if hosts else contextlib.nullcontext() as usage:
            told = adding(show, total)
            apart = of_base if usage is None else _uncounted(of_base, usage)
            moved = drift.drift(loaded, apart, rows, batch_size=reading.batch_size, progress=told)
        for hosted in tqdm(hosts, desc="slots", unit=" memories", disable=None):
            near = slot_tokens(loaded, tokenizer, hosted.layer, usage=usage, most=_MOST_SLOTS, memory=hosted.name)
            values.append(slots_table(near, hosted.place))
    compared = {"model": model, "base": _in_words(base)}
    fetched = {
        of_text.name: usage_by_rows(bank_layouts(loaded), of_text) for of_text in rows if of_text.paths is not None
    }
    write_inside_page(output, compared, effects, moved, values, fetched, tokenizer)


def _load_with_base(
    model: str, base: str, loading: Loading
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, LogitsOfBase]":
    """A model, its tokenizer, and what gives the logits of its base.

    Args:
        model: Folder or hub id.
        base: Likewise, or `"self"`: the model with all that was added switched off.
        loading: How both are loaded.

    Raises:
        ValueError: If one cannot be loaded, or the base is not in the model, or reads text as other tokens.
    """
    if base == "self":
        _check_base_within(model)
    from midus_hf.analysis.inside.drift import base_within, other_base

    loaded, tokenizer = loading.load(model)
    if base == "self":
        return loaded, tokenizer, base_within(loaded)
    other, of_other = loading.load(base, "base")
    if of_other.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"base is {base!r}, whose tokenizer has other tokens than the model's; expected one tokenizer."
        )
    return loaded, tokenizer, other_base(loaded, other)


def _in_words(base: str) -> str:
    """A base as a page names it."""
    return "its base, which is the model without what was added" if base == "self" else base


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


def _uncounted(of_base: "LogitsOfBase", usage: "Usage") -> "LogitsOfBase":
    """The same, without counting the slots that the base reads, where it has memories of its own."""

    def logits(rows: "Sequence[torch.Tensor]") -> "torch.Tensor":
        with usage.paused():
            return of_base(rows)

    return logits
