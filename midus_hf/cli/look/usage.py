"""`midus look usage`: which slots, chapters and blocks a text uses."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midus_hf.cli.reading import (
    Column,
    Encoding,
    Json,
    Loading,
    Reading,
    Retriever,
    check_picture,
    model_argument,
    path_finder,
    show_tables,
    token_bar,
    working,
)

if TYPE_CHECKING:
    import torch

    from midus_hf.analysis.slots.block_usage import BankLevel
    from midus_hf.analysis.watched_models import MemoryPlace


def usage(
    model: Annotated[str, model_argument("Folder or hub id of a model with memory layers.")],
    text: Annotated[str, typer.Option(help="The file or folder to read.", metavar="PATH")],
    *,
    column: Column = "text",
    encoding: Encoding = "utf-8",
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a window.  [default: 1024, or what the model was made for]", metavar="N"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of the text to read.  [default: all]", metavar="N")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass.", metavar="N")] = 4,
    retriever: Retriever = None,
    loading: Loading,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Draw the usage, most retrieved slots first (.png, .svg or .pdf).  [default: none]", metavar="FILE"
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Let a model read a text and say which slots are retrieved, which chapters opened and which blocks fetched, and how evenly."""
    from rich.console import Console

    from midus_hf.analysis.chapters.usage import record_chapter_usage
    from midus_hf.analysis.pictures import PICTURE_SUFFIXES
    from midus_hf.analysis.slots.block_usage import bank_layouts, record_block_usage
    from midus_hf.analysis.slots.report import as_json, blocks_table, draw_usage, usage_table
    from midus_hf.analysis.slots.usage import counted_types, record_usage, summarise, uncounted_memories
    from midus_hf.evaluation.perplexity import perplexity
    from midus_hf.evaluation.settings import check_dtype
    from midus_hf.memory.protocols import RetrievesSlots

    with working():
        check_dtype(loading.dtype)
        check_picture("output", output, *PICTURE_SUFFIXES, what="is a picture, which needs")
        documents = Reading(column, encoding).documents_at(text)
        loaded, tokenizer = loading.load(model)
        uncounted = uncounted_memories(loaded)
        has_chapters = uncounted.pop("chapters", None) is not None
        has_slots = any(isinstance(module, RetrievesSlots) for module in loaded.modules())
        banks = bank_layouts(loaded)
        if banks and retriever is None and not (has_slots or has_chapters):
            raise ValueError(
                f"the texts of this {loaded.config.model_type} model fetch blocks, and nothing says which; expected "
                "the tree of topics that they are found by. Pass --retriever."
            )
        if not (has_slots or has_chapters or banks):
            others = ", ".join(uncounted)
            raise ValueError(
                f"this {loaded.config.model_type} model has no memory whose use can be counted"
                f"{others and f', only memory of type {others}'}; expected an upscaled model with memory of one of the types: "
                f"{', '.join(counted_types())}."
            )
        find_paths = path_finder(loaded, retriever)
        blocks = None
        with contextlib.ExitStack() as stack, token_bar() as show:
            recorded = []
            if find_paths is not None:
                blocks = stack.enter_context(record_block_usage(loaded))
                for layout in banks.values():
                    uncounted.pop(layout.memory_type, None)
            if has_slots:
                recorded.append(stack.enter_context(record_usage(loaded)))
            if has_chapters:
                recorded.append(stack.enter_context(record_chapter_usage(loaded)))

            result = perplexity(
                loaded,
                tokenizer,
                documents,
                sequence_length=sequence_length,
                max_tokens=max_tokens,
                batch_size=batch_size,
                progress=show,
                apart=find_paths is not None,
                find_paths=find_paths,
            )
    counts = {place: of_memory for usage in recorded for place, of_memory in usage.counts.items()}
    memories = summarise(dict(sorted(counts.items())))
    for memory_type, of_type in uncounted.items():
        listed = ", ".join(map(str, of_type))
        print(f"not counted: memory of type {memory_type} in layers {listed}, which has no slots", file=sys.stderr)
    if json_:
        report = {
            "model": model,
            "tokens": result.tokens,
            "perplexity": result.perplexity,
            "layers": {str(place): dataclasses.asdict(of_memory) for place, of_memory in memories.items()},
            "blocks": {} if blocks is None else as_json(blocks),
            "not_counted": uncounted,
        }
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        console = Console()
        if memories:
            console.print(usage_table(memories))
        if blocks is not None:
            show_tables([blocks_table({Path(text).name: blocks})])
        console.print(f"{result.tokens:,} tokens of {text}, perplexity {result.perplexity:.4f}")
    if output is not None:  # last, so that a picture that cannot be written costs nothing else
        drawn: dict[MemoryPlace | BankLevel, torch.Tensor] = dict(counts.items())
        drawn.update({} if blocks is None else blocks.counts.items())
        draw_usage(drawn, output)
