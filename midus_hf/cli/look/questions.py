"""The answers of `midus look`, a function per question."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from midus_hf.cli.look.request import Request
from midus_hf.cli.options import needing_harness
from midus_hf.look import ablation as of_parts
from midus_hf.look import depth_report as of_depth
from midus_hf.look import drift as of_drift
from midus_hf.look import heads as of_heads
from midus_hf.look import usage_report as of_slots
from midus_hf.look.block_usage import BlockUsage, bank_layouts, usage_by_rows
from midus_hf.look.chapters import one_memory
from midus_hf.look.depth import depth_map, depth_readings, readers_of_depth, record_depth, writers
from midus_hf.look.page import Answer
from midus_hf.look.parts import added_parts, chapter_parts
from midus_hf.look.text_rows import TextRows, adding, read_rows, read_texts
from midus_hf.look.usage import counted_types, record_chapter_usage, record_usage, summarise, uncounted_memories
from midus_hf.look.watched_models import MemoryPlace
from midus_hf.memory.protocols import RetrievesSlots
from midus_hf.short_names import short_names

# Number of slots that were written that a terminal shows. JSON and the page have all.
_MOST_WRITERS = 10
# Number of rows per text that `drift` shows by default.
_MOST_ROWS = 5


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
        not_counted: Layers of memories without anything to count, by type of memory.
    """

    not_counted: dict[str, list[int]]
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: dict[str, dict[MemoryPlace, torch.Tensor]] = dataclasses.field(default_factory=dict)
    blocks: dict[str, BlockUsage] = dataclasses.field(default_factory=dict)

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
    used = _count_usage(request)
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


def _count_usage(request: Request) -> _TextUsage:
    """Let the model read the texts, and return which slots, chapters and blocks they used.

    If fetched blocks are all that can be counted, the model does not read.
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
        recorders = [record_usage] * _has_slots(model) + [record_chapter_usage] * has_chapters
        counters = [stack.enter_context(record(model)) for record in recorders]
        if not counters:
            return used
        advance = adding(stack.enter_context(_token_bar()), sum(text.num_tokens for text in rows))
        for text in rows:
            used.losses[text.name] = read_rows(model, text, batch_size=request.batch_size, progress=advance).mean
            counts = {spot: counted.clone() for counter in counters for spot, counted in counter.counts.items()}
            used.counts[text.name] = dict(sorted(counts.items()))
            for counter in counters:
                counter.reset()
    return used


def _usage_answer(request: Request, used: _TextUsage) -> Answer:
    summaries = {text: summarise(counts) for text, counts in used.counts.items()}
    texts = _texts_with(used.losses, request.text_rows)
    for name, text in texts.items():
        text["layers"] = {str(spot): vars(each) for spot, each in summaries.get(name, {}).items()}
        text["blocks"] = of_slots.as_json(used.blocks[name]) if name in used.blocks else {}
    pictures = {}
    if used.counts:
        pictures["How often slots are retrieved"] = lambda: of_slots.draw_usage(used.total())
    if used.blocks:
        pictures["How often blocks are fetched"] = lambda: of_slots.draw_blocks(used.blocks)

    def as_csv() -> str:
        counts: dict[str, dict[Any, Any]] = {
            text: {**used.counts.get(text, {}), **(used.blocks[text].counts if text in used.blocks else {})}
            for text in texts
        }
        return of_slots.usage_csv(counts)

    return Answer(
        title="What texts use of the memories",
        report={"model": request.model, "texts": texts, "not_counted": used.not_counted},
        tables=[of_slots.usage_table(summaries), of_slots.blocks_table(used.blocks)],
        summary=_read_by(request.model, texts),
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
    model, _ = request.loaded
    added_parts(model)
    parts = None
    if request.chapters is not None:
        of_memory = one_memory(model, request.memory)
        parts = chapter_parts(model, request.numbers("chapters", of_memory[0].module.num_chapters), request.memory)
    elif request.memory is not None:
        raise ValueError(f"memory is {request.memory!r}, which is for chapters; give --chapters as well.")
    rows = request.text_rows
    with _token_bar("ablation") as show:
        effects = of_parts.layer_effects(
            model, rows, parts=parts, with_base=request.all_, batch_size=request.batch_size, progress=show
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


def page(request: Request) -> Answer:
    """Answer every question that texts answer about the model: usage, ablation, drift and reading of the depth."""
    request.check_base()
    model, _ = request.loaded
    answers: dict[str, Answer] = {}
    if _can_count(request):
        answers["usage"] = _usage_answer(request, _count_usage(request))
    answers["ablation"] = ablation(request)
    answers["drift"] = _moved_predictions(request)
    if "depth-attention" in uncounted_memories(model) and len(request.documents) == 1:
        answers["depth"] = depth(request)
    return Answer(
        title="Inside the model",
        summary=f"{request.model}, on {', '.join(request.documents)}.",
        report={name: answer.report for name, answer in answers.items()},
        tables=[table for answer in answers.values() for table in answer.tables],
        sections=list(answers.values()),
    )
