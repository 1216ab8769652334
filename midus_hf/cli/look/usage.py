"""`midus look usage`: which slots, chapters and blocks texts use, and how evenly."""

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from midus_hf.cli.look.request import QUESTIONS, READING, Request
from midus_hf.cli.reading import sizes_of, token_bar

if TYPE_CHECKING:
    import torch

    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.chapters.stats import ChapterStats
    from midus_hf.analysis.slots.block_usage import BlockUsage
    from midus_hf.analysis.watched_models import MemoryPlace

# Number of layers whose typical chapters a terminal shows. JSON and the page have all layers.
_MOST_LAYERS = 3


@dataclasses.dataclass
class TextUsage:
    """Slots, chapters and blocks of a model's memories that texts used.

    Args:
        losses: Mean loss of each text, in nats per token, by the text's name; empty if the model did not read.
        counts: Retrievals of slots and openings of chapters, `[H, N]` per memory, by the text's name.
        blocks: Fetched blocks, by the text's name; empty if texts fetch nothing.
        chapters: Statistics of chapters, per memory and layer.
        not_counted: Layers of memories without anything to count, by type of memory.
    """

    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: "dict[str, dict[MemoryPlace, torch.Tensor]]" = dataclasses.field(default_factory=dict)
    blocks: "dict[str, BlockUsage]" = dataclasses.field(default_factory=dict)
    chapters: "list[ChapterStats]" = dataclasses.field(default_factory=list)
    not_counted: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def total(self) -> "dict[MemoryPlace, torch.Tensor]":
        """Return the counts of all texts together."""
        totals: dict[MemoryPlace, torch.Tensor] = {}
        for of_text in self.counts.values():
            for memory_place, counts in of_text.items():
                totals[memory_place] = totals[memory_place] + counts if memory_place in totals else counts
        return totals


@QUESTIONS.register(
    "usage", "slots, chapters and blocks that texts use, and how evenly", (*READING, "memory"), ("text",)
)
def usage(request: Request) -> "Answer":
    """Answer which slots are retrieved, which chapters opened and which blocks fetched, and how evenly."""
    documents = request.documents
    from midus_hf.analysis.slots.block_usage import bank_layouts
    from midus_hf.analysis.slots.usage import counted_types, uncounted_memories

    model, _ = request.loaded
    if not can_count(request):
        if bank_layouts(model):
            raise ValueError(
                f"the texts of this {model.config.model_type} model fetch blocks, and nothing says which; expected "
                "the tree of topics that they are found by. Pass --retriever."
            )
        others = ", ".join(uncounted_memories(model))
        raise ValueError(
            f"this {model.config.model_type} model has no memory whose use can be counted"
            f"{others and f', only memory of type {others}'}; expected an upscaled model with memory of one of the types: "
            f"{', '.join(counted_types())}."
        )
    assert documents
    used = count_usage(request, request.memory)
    for memory_type, of_type in used.not_counted.items():
        listed = ", ".join(map(str, of_type))
        print(f"not counted: memory of type {memory_type} in layers {listed}, which has no slots", file=sys.stderr)
    return usage_answer(request, used)


def can_count(request: Request) -> bool:
    """Return whether the model has slots, chapters or fetched blocks whose use can be counted."""
    from midus_hf.analysis.slots.block_usage import bank_layouts
    from midus_hf.analysis.slots.usage import uncounted_memories
    from midus_hf.memory.protocols import RetrievesSlots

    model, _ = request.loaded
    has_slots = any(isinstance(module, RetrievesSlots) for module in model.modules())
    fetches = bool(bank_layouts(model)) and request.retriever is not None
    return has_slots or fetches or "chapters" in uncounted_memories(model)


def count_usage(request: Request, memory: str | None) -> TextUsage:
    """Let the model read the texts, and return which slots, chapters and blocks they used.

    If fetched blocks are all that can be counted, the model does not read.

    Args:
        memory: Name of one of several memories of chapters. None: all memories of chapters.

    Raises:
        ValueError: If the model has no memory of chapters with this name.
    """
    from midus_hf.analysis.chapters.records import record_chapters
    from midus_hf.analysis.chapters.stats import chapter_stats
    from midus_hf.analysis.chapters.usage import record_chapter_usage
    from midus_hf.analysis.slots.block_usage import bank_layouts, usage_by_rows
    from midus_hf.analysis.slots.usage import record_usage, uncounted_memories
    from midus_hf.analysis.text_rows import adding, read_rows
    from midus_hf.memory.protocols import RetrievesSlots

    model, _ = request.loaded
    used = TextUsage(not_counted=uncounted_memories(model))
    has_chapters = used.not_counted.pop("chapters", None) is not None
    rows = request.text_rows
    layouts = bank_layouts(model)
    if all(text.paths is not None for text in rows):
        used.blocks = {text.name: usage_by_rows(layouts, text) for text in rows}
        for layout in layouts.values():
            used.not_counted.pop(layout.memory_type, None)
    with contextlib.ExitStack() as stack:
        counters, records = [], None
        if any(isinstance(module, RetrievesSlots) for module in model.modules()):
            counters.append(stack.enter_context(record_usage(model)))
        if has_chapters or memory is not None:
            records = stack.enter_context(record_chapters(model, memory))
            counters.append(stack.enter_context(record_chapter_usage(model)))
        if not counters:
            return used
        advance = adding(stack.enter_context(token_bar()), sum(text.num_tokens for text in rows))
        for text in rows:
            read = read_rows(model, text, batch_size=request.batch_size, records=records, progress=advance)
            used.losses[text.name] = read.mean
            counts = {spot: counted.clone() for counter in counters for spot, counted in counter.counts.items()}
            used.counts[text.name] = dict(sorted(counts.items()))
            for counter in counters:
                counter.reset()
        used.chapters = [] if records is None else chapter_stats(records)
    return used


def usage_answer(request: Request, used: TextUsage) -> "Answer":
    """Return usage as an answer: tables, JSON, CSV and pictures."""
    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.chapters import report as of_chapters
    from midus_hf.analysis.chapters.tables import reading_table, typical_table
    from midus_hf.analysis.slots.report import as_json, blocks_table, draw_blocks, draw_usage, usage_csv, usage_table
    from midus_hf.analysis.slots.usage import summarise

    summaries = {text: summarise(counts) for text, counts in used.counts.items()}
    texts: dict[str, dict[str, Any]] = {}
    for text in request.text_rows:
        texts[text.name] = {
            **sizes_of(text),
            "loss": used.losses.get(text.name),
            "layers": {str(spot): vars(each) for spot, each in summaries.get(text.name, {}).items()},
            "blocks": as_json(used.blocks[text.name]) if text.name in used.blocks else {},
        }
    tables = [usage_table(summaries), blocks_table(used.blocks)]
    terminal_tables, pictures = list(tables), {}
    if used.counts:
        pictures["How often slots are retrieved"] = lambda: draw_usage(used.total())
    if used.blocks:
        pictures["How often blocks are fetched"] = lambda: draw_blocks(used.blocks)
    if used.chapters:
        tables += [reading_table(used.chapters), typical_table(used.chapters)]
        terminal_tables += [reading_table(used.chapters), typical_table(used.chapters, _MOST_LAYERS)]
        pictures |= of_chapters.stats_pictures(used.chapters)
    counts: dict[str, dict[Any, Any]] = {
        text: {**used.counts.get(text, {}), **(used.blocks[text].counts if text in used.blocks else {})}
        for text in texts
    }
    return Answer(
        title="What texts use of the memories",
        report={
            "model": request.model,
            "texts": texts,
            "chapters": [dataclasses.asdict(of_layer) for of_layer in used.chapters],
            "not_counted": used.not_counted,
        },
        tables=tables,
        terminal_tables=terminal_tables,
        summary=read_by(request.model, texts),
        paragraphs=[of_chapters.HOW_TO_READ] if used.chapters else [],
        pictures=pictures,
        csv=lambda: of_chapters.stats_csv(used.chapters) if used.chapters else usage_csv(counts),
    )


def read_by(model: str, texts: dict[str, dict[str, Any]]) -> str:
    """Return a sentence that says which texts a model read, and with which loss."""
    listed = []
    for name, text in texts.items():
        loss = "" if text.get("loss") is None else f", loss {text['loss']:.4f}"
        listed.append(f"{name} ({text['tokens']:,} tokens{loss})")
    return f"{model} read {', '.join(listed)}."
