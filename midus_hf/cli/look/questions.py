"""The answers of `midus look`, a function per question."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from midus_hf.analysis.chapters import report as of_chapters
from midus_hf.analysis.chapters.ablation import ablate
from midus_hf.analysis.chapters.edits import one_memory
from midus_hf.analysis.chapters.records import record_chapter_usage, record_chapters
from midus_hf.analysis.chapters.stats import ChapterStats, chapter_stats
from midus_hf.analysis.chapters.tokens import nearest_tokens
from midus_hf.analysis.depth import report as of_depth
from midus_hf.analysis.depth.map import depth_map
from midus_hf.analysis.depth.readers import readers_of_depth
from midus_hf.analysis.depth.reading import depth_readings, writers
from midus_hf.analysis.depth.records import record_depth
from midus_hf.analysis.inside import drift as of_drift
from midus_hf.analysis.inside import head_importance as of_heads
from midus_hf.analysis.inside import layer_effects as of_parts
from midus_hf.analysis.inside.added_parts import added_parts
from midus_hf.analysis.page import Answer
from midus_hf.analysis.slots import report as of_slots
from midus_hf.analysis.slots.block_usage import BlockUsage, bank_layouts, usage_by_rows
from midus_hf.analysis.slots.slot_tokens import memories_of_slots, memory_of_slots, slot_tokens, slots_table
from midus_hf.analysis.slots.usage import Usage, counted_types, record_usage, summarise, uncounted_memories
from midus_hf.analysis.text_rows import TextRows, adding, read_rows, read_texts
from midus_hf.analysis.watched_models import MemoryPlace
from midus_hf.cli.look.request import OF_CHAPTERS, Request
from midus_hf.cli.options import needing_harness
from midus_hf.memory.protocols import RetrievesSlots
from midus_hf.short_names import short_names

# Numbers of layers with typical chapters and of slots that were written that a terminal shows. JSON and the page have all.
_MOST_LAYERS, _MOST_WRITERS = 3, 10
# Numbers of rows per text that `drift` shows, and of slots that `values` shows, by default.
_MOST_ROWS, _MOST_SLOTS = 5, 10
# Number of slots of each memory that the page shows.
_SLOTS_ON_PAGE = 3
_HOW_TO_READ_VALUES = (
    "{} is read through the model's final norm and head, as if it were all that is added: a probe, no proof."
)


@contextlib.contextmanager
def _token_bar(what: str = "reading") -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of tokens, titled `what`. Yield the function that sets the tokens done and in total."""
    with tqdm(desc=what, unit=" tokens", disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _texts_with(losses: dict[str, float], rows: Sequence[TextRows]) -> dict[str, dict[str, Any]]:
    """Return the sizes and the loss of each text, as reports hold them. The loss of a text that was not read is None."""
    return {
        text.name: {
            "documents": len(set(text.documents)),
            "rows": len(text.rows),
            "tokens": text.num_tokens,
            "loss": losses.get(text.name),
        }
        for text in rows
    }


def _read_by(model: str, texts: dict[str, dict[str, Any]]) -> str:
    """Return a sentence that says which texts a model read, and with which loss."""
    listed = []
    for name, text in texts.items():
        loss = "" if text["loss"] is None else f", loss {text['loss']:.4f}"
        listed.append(f"{name} ({text['tokens']:,} tokens{loss})")
    return f"{model} read {', '.join(listed)}."


@dataclasses.dataclass
class _TextUsage:
    """Slots, chapters and blocks of a model's memories that texts used.

    Args:
        losses: Mean loss of each text, in nats per token, by the text's name; empty if the model did not read.
        counts: Retrievals of slots and openings of chapters, `[H, N]` per memory, by the text's name.
        blocks: Fetched blocks, by the text's name; empty if texts fetch nothing.
        chapters: Statistics of chapters, per memory and layer.
        not_counted: Layers of memories without anything to count, by type of memory.
    """

    not_counted: dict[str, list[int]]
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: dict[str, dict[MemoryPlace, torch.Tensor]] = dataclasses.field(default_factory=dict)
    blocks: dict[str, BlockUsage] = dataclasses.field(default_factory=dict)
    chapters: list[ChapterStats] = dataclasses.field(default_factory=list)

    def total(self) -> dict[MemoryPlace, torch.Tensor]:
        """Return the counts of all texts together."""
        first, *others = self.counts.values()
        return {spot: sum((of_text[spot] for of_text in others), counts) for spot, counts in first.items()}


def usage(request: Request) -> Answer:
    """Answer which slots are retrieved, which chapters opened and which blocks fetched, and how evenly."""
    model, _ = request.loaded
    if not _can_count(request):
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
    used = _count_usage(request, request.memory)
    for memory_type, of_type in used.not_counted.items():
        listed = ", ".join(map(str, of_type))
        print(f"not counted: memory of type {memory_type} in layers {listed}, which has no slots", file=sys.stderr)
    return _usage_answer(request, used)


def _can_count(request: Request) -> bool:
    """Return whether the model has slots, chapters or fetched blocks whose use can be counted."""
    model, _ = request.loaded
    fetches = bool(bank_layouts(model)) and request.retriever is not None
    return _has_slots(model) or fetches or "chapters" in uncounted_memories(model)


def _has_slots(model: Any) -> bool:
    return any(isinstance(module, RetrievesSlots) for module in model.modules())


def _count_usage(request: Request, memory: str | None) -> _TextUsage:
    """Let the model read the texts, and return which slots, chapters and blocks they used.

    If fetched blocks are all that can be counted, the model does not read.

    Args:
        request: The request, which names the model and the texts.
        memory: Name of one of several memories of chapters. None: all memories of chapters.

    Raises:
        ValueError: If the model has no memory of chapters with this name.
    """
    model, _ = request.loaded
    used = _TextUsage(uncounted_memories(model))
    has_chapters = used.not_counted.pop("chapters", None) is not None
    rows = request.text_rows
    layouts = bank_layouts(model)
    if all(text.paths is not None for text in rows):
        used.blocks = {text.name: usage_by_rows(layouts, text) for text in rows}
        for layout in layouts.values():
            used.not_counted.pop(layout.memory_type, None)
    with contextlib.ExitStack() as stack:
        counters, records = [], None
        if _has_slots(model):
            counters.append(stack.enter_context(record_usage(model)))
        if has_chapters or memory is not None:
            records = stack.enter_context(record_chapters(model, memory))
            counters.append(stack.enter_context(record_chapter_usage(model)))
        if not counters:
            return used
        advance = adding(stack.enter_context(_token_bar()), sum(text.num_tokens for text in rows))
        for text in rows:
            read = read_rows(model, text, batch_size=request.batch_size, records=records, progress=advance)
            used.losses[text.name] = read.mean
            counts = {spot: counted.clone() for counter in counters for spot, counted in counter.counts.items()}
            used.counts[text.name] = dict(sorted(counts.items()))
            for counter in counters:
                counter.reset()
        used.chapters = [] if records is None else chapter_stats(records)
    return used


def _usage_answer(request: Request, used: _TextUsage) -> Answer:
    summaries = {text: summarise(counts) for text, counts in used.counts.items()}
    texts = _texts_with(used.losses, request.text_rows)
    for name, text in texts.items():
        text["layers"] = {str(spot): vars(each) for spot, each in summaries.get(name, {}).items()}
        text["blocks"] = of_slots.as_json(used.blocks[name]) if name in used.blocks else {}
    tables = [of_slots.usage_table(summaries), of_slots.blocks_table(used.blocks)]
    terminal_tables, pictures = list(tables), {}
    if used.counts:
        pictures["How often slots are retrieved"] = lambda: of_slots.draw_usage(used.total())
    if used.blocks:
        pictures["How often blocks are fetched"] = lambda: of_slots.draw_blocks(used.blocks)
    if used.chapters:
        reading = of_chapters.reading_table(used.chapters)
        tables += [reading, of_chapters.typical_table(used.chapters)]
        terminal_tables += [reading, of_chapters.typical_table(used.chapters, _MOST_LAYERS)]
        pictures |= of_chapters.stats_pictures(used.chapters)

    def as_csv() -> str:
        if used.chapters:
            return of_chapters.stats_csv(used.chapters)
        counts: dict[str, dict[Any, Any]] = {
            text: {**used.counts.get(text, {}), **(used.blocks[text].counts if text in used.blocks else {})}
            for text in texts
        }
        return of_slots.usage_csv(counts)

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
        summary=_read_by(request.model, texts),
        paragraphs=[of_chapters.HOW_TO_READ] if used.chapters else [],
        pictures=pictures,
        csv=as_csv,
    )


def depth(request: Request) -> Answer:
    """Answer which share of attention goes to the depth, and which earlier layers are read.

    If the request names one layer and one head, the pictures also have a map: the share that each token of the longest row gives
    to each key and slot.
    """
    if len(request.documents) > 1:
        raise ValueError(f"{len(request.documents)} texts are given; expected one to read the depth with.")
    model, _ = request.loaded
    config = model.config.get_text_config()
    layers = request.numbers("layers", config.num_hidden_layers)
    heads = request.numbers("heads", config.num_attention_heads)
    readers_of_depth(model, request.memory, layers)
    (rows,) = request.text_rows
    of_head = None
    if layers is not None and heads is not None and len(layers) == len(heads) == 1:
        of_head = depth_map(model, rows.rows[0], layers[0], heads[0], request.memory)
    recording = record_depth(model, request.memory, layers=layers, heads=heads)
    with _token_bar() as show, recording as records:
        losses = read_texts(model, [rows], batch_size=request.batch_size, progress=show)
    readings = depth_readings(records)
    written = writers(readings)
    texts = _texts_with({rows.name: losses[rows.name].mean}, [rows])
    of_layers = of_depth.layers_table(readings)
    return Answer(
        title="What heads read of the depth",
        summary=_read_by(request.model, texts),
        report={"model": request.model, "texts": texts, **of_depth.as_json(readings, written)},
        tables=[of_layers, of_depth.writers_table(written)],
        terminal_tables=[of_layers, of_depth.writers_table(written, _MOST_WRITERS)],
        paragraphs=[of_depth.HOW_TO_READ],
        pictures=of_depth.depth_pictures(readings, of_head),
    )


def ablation(request: Request) -> Answer:
    """Answer how the loss of each text changes without each added layer, memory and reading of the depth, or each chapter."""
    if request.chapters is not None:
        if request.all_:
            raise ValueError(
                "all is true and chapters are given; --all is for layers of the base. Leave one of them out."
            )
        return _without_chapters(request)
    defaults = {field.name: field.default for field in dataclasses.fields(request)}
    for name in OF_CHAPTERS:
        if getattr(request, name) != defaults[name]:
            raise ValueError(f"{name} is {getattr(request, name)!r}, which is for chapters; give --chapters as well.")
    return _without_parts(request)


def _without_parts(request: Request) -> Answer:
    model, _ = request.loaded
    added_parts(model)
    rows = request.text_rows
    with _token_bar("ablation") as show:
        effects = of_parts.layer_effects(
            model, rows, with_base=request.all_, batch_size=request.batch_size, progress=show
        )
    return Answer(
        title="What texts lose without parts of the model",
        summary=_read_by(request.model, _texts_with(effects.losses, rows)),
        report={"model": request.model, **of_parts.as_json(effects)},
        tables=[of_parts.layers_table(effects)],
        paragraphs=[of_parts.HOW_TO_READ],
        pictures={"Loss without each part": lambda: of_parts.draw_layers(effects)},
        csv=lambda: of_parts.as_csv(effects),
    )


def _without_chapters(request: Request) -> Answer:
    model, _ = request.loaded
    chapters = request.numbers("chapters", one_memory(model, request.memory)[0].module.num_chapters)
    layers = request.numbers("layers", model.config.get_text_config().num_hidden_layers)
    rows = request.text_rows
    mode: Any = request.mode  # `ablate` checks the mode
    with _token_bar("ablation") as show:
        effects = ablate(
            model,
            rows,
            chapters=chapters,
            layers=layers,
            mode=mode,
            top=request.top,
            memory=request.memory,
            batch_size=request.batch_size,
            seed=request.seed,
            progress=show,
        )
    texts = _texts_with(effects.losses, rows)
    numbers = dataclasses.asdict(effects)
    return Answer(
        title="What texts lose without a chapter",
        summary=_read_by(request.model, texts),
        report={
            "model": request.model,
            "texts": texts,
            **{key: numbers[key] for key in ("mode", "memory", "layers", "chapters")},
        },
        tables=[of_chapters.ablation_table(effects)],
        pictures={"Loss without each chapter": lambda: of_chapters.draw_ablation(effects)},
        csv=lambda: of_chapters.ablation_csv(effects),
    )


def drift(request: Request) -> Answer:
    """Answer how far predictions moved from the base's: divergence, top-1 predictions, loss, and the rows that moved most."""
    request.check_base()
    return _moved_predictions(request)


def _moved_predictions(request: Request) -> Answer:
    model, tokenizer = request.loaded
    of_base = _logits_of_base(request)
    rows = request.text_rows
    with _token_bar("drift") as show:
        moved = of_drift.drift(
            model,
            of_base,
            rows,
            most_shown=request.top or _MOST_ROWS,
            batch_size=request.batch_size,
            progress=adding(show, sum(text.num_tokens for text in rows)),
        )
    base = "its base, which is the model without what was added" if request.base == "self" else request.base
    return Answer(
        title="How far predictions moved",
        summary=f"{request.model} compared with {base}.",
        report={"model": request.model, "base": request.base, "texts": of_drift.as_json(moved, tokenizer)},
        tables=[of_drift.drift_table(moved), of_drift.moved_table(moved, tokenizer)],
        paragraphs=[of_drift.HOW_TO_READ],
        passages=of_drift.passages(moved, tokenizer),
    )


def _logits_of_base(request: Request) -> of_drift.LogitsOfBase:
    """Return a function that computes the base's logits.

    Raises:
        ValueError: If the base cannot be loaded, is not in the model, or reads text as other tokens.
    """
    model, tokenizer = request.loaded
    if request.base == "self":
        return of_drift.base_within(model)
    base, of_base = request.load(request.base, "base")
    if of_base.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"base is {request.base!r}, whose tokenizer has other tokens than the model's; expected one tokenizer."
        )
    return of_drift.other_base(model, base)


def heads(request: Request) -> Answer:
    """Answer how much each head of attention matters for right answers, and how much heads of a layer differ in that."""
    names = [name.strip() for name in (request.tasks or "").split(",") if name.strip()]
    importances = {}
    with needing_harness():
        from midus_hf.evaluation.harness import Tasks
        from midus_hf.evaluation.quiet import quiet_libraries

        with quiet_libraries():
            tasks = Tasks(names, data=request.data, include_path=request.include_path)
            for model in request.models:
                loaded, tokenizer = request.load(model)
                answers = list(of_heads.task_answers(loaded, tokenizer, tasks, request.limit))
                with tqdm(desc=model, total=len(answers), unit=" answers", disable=None) as bar:
                    importances[model] = of_heads.head_importance(loaded, answers, bar.update)
    labelled = dict(zip(short_names(list(importances)), importances.values(), strict=True))
    return Answer(
        title="How much heads matter",
        summary=f"{', '.join(labelled)} answered {', '.join(names)}.",
        report={"tasks": names, "limit": request.limit, "models": of_heads.as_json(importances)},
        tables=[of_heads.layers_table(label, one, not request.signed) for label, one in labelled.items()],
        pictures={"Importance of heads": lambda: of_heads.draw_heads(labelled, not request.signed)},
    )


def values(request: Request) -> Answer:
    """Answer which tokens are nearest to what slots or chapters hold, read through the model's own head."""
    if request.chapters is not None:
        return _values_of_chapters(request)
    if request.rows:
        raise ValueError("rows is true, which is for chapters; give --chapters as well.")
    if request.layers is None:
        raise ValueError(
            "neither layers nor chapters are given; expected the layer whose slots are shown, or chapters."
        )
    if not request.text and request.slots is None:
        raise ValueError(
            "neither text nor slots are given; expected one: slots by number, or a text to see which are used."
        )
    model, _ = request.loaded
    layer = request.one_number("layers", model.config.get_text_config().num_hidden_layers)
    assert layer is not None, "layers are given"
    hosted = memory_of_slots(model, layer, request.memory)
    slots = request.numbers("slots", hosted.module.num_slots)
    used = _count_usage(request, memory=None) if request.documents else None
    return _values_of_slots(request, hosted.place, slots, used, request.top or _MOST_SLOTS)


def _values_of_slots(
    request: Request, spot: MemoryPlace, slots: tuple[int, ...] | None, used: _TextUsage | None, most: int
) -> Answer:
    """Return the tokens nearest to what slots of one memory add: of `slots`, or of the `most` used ones."""
    model, tokenizer = request.loaded
    near = slot_tokens(
        model,
        tokenizer,
        spot.layer,
        head=request.one_number("heads", memory_of_slots(model, *spot).module.num_heads),
        slots=slots,
        usage=None if used is None else Usage(used.total()),
        most=most,
        top=request.tokens,
        memory=spot.name,
    )
    return Answer(
        title=f"What slots add in layer {spot}",
        summary=_HOW_TO_READ_VALUES.format("What a slot adds"),
        report={
            "model": request.model,
            "layer": spot.layer,
            "memory": spot.name,
            "slots": [dataclasses.asdict(of_slot) for of_slot in near],
        },
        tables=[slots_table(near, spot)],
    )


def _values_of_chapters(request: Request) -> Answer:
    model, tokenizer = request.loaded
    near = nearest_tokens(
        model,
        tokenizer,
        chapters=request.numbers("chapters", one_memory(model, request.memory)[0].module.num_chapters),
        layers=request.numbers("layers", model.config.get_text_config().num_hidden_layers),
        top=request.tokens,
        each_row=request.rows,
        memory=request.memory,
    )
    return Answer(
        title="What chapters hold",
        summary=_HOW_TO_READ_VALUES.format("What a chapter holds"),
        report={"model": request.model, "chapters": [dataclasses.asdict(of_chapter) for of_chapter in near]},
        tables=[of_chapters.nearest_table(near)],
    )


def page(request: Request) -> Answer:
    """Answer every question that texts answer about the model: usage, ablation, drift, reading of the depth, and values."""
    request.check_base()
    model, _ = request.loaded
    types = uncounted_memories(model)
    answers: dict[str, Answer] = {}
    used = _count_usage(request, memory=None) if _can_count(request) else None
    if used is not None:
        answers["usage"] = _usage_answer(request, used)
    answers["ablation"] = _without_parts(request)
    answers["drift"] = _moved_predictions(request)
    if "depth-attention" in types and len(request.documents) == 1:
        answers["depth"] = depth(request)
    for hosted in memories_of_slots(model) if used is not None else ():
        near = _values_of_slots(request, hosted.place, None, used, _SLOTS_ON_PAGE)
        answers[f"values of layer {hosted.place}"] = near
    if "chapters" in types:
        answers["values of chapters"] = _values_of_chapters(request)
    return Answer(
        title="Inside the model",
        summary=f"{request.model}, on {', '.join(request.documents)}.",
        report={name: answer.report for name, answer in answers.items()},
        tables=[table for answer in answers.values() for table in answer.tables],
        sections=list(answers.values()),
    )
