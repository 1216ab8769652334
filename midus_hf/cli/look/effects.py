"""`midus look ablation|drift`: loss of texts without parts of a model, and how far predictions moved from the base's."""

import dataclasses
from typing import TYPE_CHECKING

from midus_hf.cli.look.request import QUESTIONS, READING, Request
from midus_hf.cli.look.usage import read_by
from midus_hf.cli.reading import sizes_of, token_bar

if TYPE_CHECKING:
    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.inside.drift import LogitsOfBase

_OF_CHAPTERS = ("mode", "seed", "top", "layers", "memory")
# Number of rows per text that `drift` shows by default.
_MOST_ROWS = 5


@QUESTIONS.register(
    "ablation",
    "loss of texts without each added part, or each of --chapters",
    (*READING, "chapters", "all_", *_OF_CHAPTERS),
    ("text",),
)
def ablation(request: Request) -> "Answer":
    """Answer how the loss of each text changes without each added layer, memory and reading of the depth, or each chapter."""
    assert request.documents
    if request.chapters is not None:
        if request.all_:
            raise ValueError(
                "all is true and chapters are given; --all is for layers of the base. Leave one of them out."
            )
        return _without_chapters(request)
    for name in _OF_CHAPTERS:
        default = next(field.default for field in dataclasses.fields(request) if field.name == name)
        if getattr(request, name) != default:
            raise ValueError(f"{name} is {getattr(request, name)!r}, which is for chapters; give --chapters as well.")
    return without_parts(request)


def without_parts(request: Request) -> "Answer":
    """Return how the loss of each text changes without each added layer, memory and reading of the depth."""
    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.inside.added_parts import added_parts
    from midus_hf.analysis.inside.layer_effects import layer_effects
    from midus_hf.analysis.inside.layer_report import HOW_TO_READ, as_csv, as_json, draw_layers, layers_table

    model, _ = request.loaded
    added_parts(model)
    rows = request.text_rows
    with token_bar("ablation") as show:
        effects = layer_effects(model, rows, with_base=request.all_, batch_size=request.batch_size, progress=show)
    texts = {text.name: {**sizes_of(text), "loss": effects.losses[text.name]} for text in rows}
    return Answer(
        title="What texts lose without parts of the model",
        summary=read_by(request.model, texts),
        report={"model": request.model, **as_json(effects)},
        tables=[layers_table(effects)],
        paragraphs=[HOW_TO_READ],
        pictures={"Loss without each part": lambda: draw_layers(effects)},
        csv=lambda: as_csv(effects),
    )


def _without_chapters(request: Request) -> "Answer":
    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.chapters.ablation import ablate
    from midus_hf.analysis.chapters.memories import one_memory
    from midus_hf.analysis.chapters.pictures import draw_ablation
    from midus_hf.analysis.chapters.report import ablation_csv
    from midus_hf.analysis.chapters.tables import ablation_table

    model, _ = request.loaded
    chapters = request.numbers("chapters", one_memory(model, request.memory)[0].module.num_chapters)
    layers = request.numbers("layers", model.config.get_text_config().num_hidden_layers)
    rows = request.text_rows
    with token_bar("ablation") as show:
        effects = ablate(
            model,
            rows,
            chapters=chapters,
            layers=layers,
            mode=request.mode,  # type: ignore[arg-type]  # `ablate` checks the mode
            top=request.top,
            memory=request.memory,
            batch_size=request.batch_size,
            seed=request.seed,
            progress=show,
        )
    texts = {text.name: {**sizes_of(text), "loss": effects.losses[text.name]} for text in rows}
    numbers = dataclasses.asdict(effects)
    return Answer(
        title="What texts lose without a chapter",
        summary=read_by(request.model, texts),
        report={
            "model": request.model,
            "texts": texts,
            **{key: numbers[key] for key in ("mode", "memory", "layers", "chapters")},
        },
        tables=[ablation_table(effects)],
        pictures={"Loss without each chapter": lambda: draw_ablation(effects)},
        csv=lambda: ablation_csv(effects),
    )


@QUESTIONS.register(
    "drift", "how far predictions moved from the base's, and where most", (*READING, "base", "top"), ("text",)
)
def drift(request: Request) -> "Answer":
    """Answer how far predictions moved from the base's: divergence, top-1 predictions, loss, and the rows that moved most."""
    assert request.documents
    request.check_base()
    return moved_predictions(request)


def moved_predictions(request: Request) -> "Answer":
    """Return how far predictions moved from the base's. The request's `check_base` has passed."""
    top = _MOST_ROWS if request.top is None else request.top
    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.inside import drift as drifts
    from midus_hf.analysis.inside.drift_report import HOW_TO_READ, as_json, drift_table, moved_table, passages
    from midus_hf.analysis.text_rows import adding

    model, tokenizer = request.loaded
    of_base = _logits_of_base(request)
    rows = request.text_rows
    with token_bar("drift") as show:
        moved = drifts.drift(
            model,
            of_base,
            rows,
            most_shown=top,
            batch_size=request.batch_size,
            progress=adding(show, sum(text.num_tokens for text in rows)),
        )
    base = "its base, which is the model without what was added" if request.base == "self" else request.base
    return Answer(
        title="How far predictions moved",
        summary=f"{request.model} compared with {base}.",
        report={"model": request.model, "base": request.base, "texts": as_json(moved, tokenizer)},
        tables=[drift_table(moved), moved_table(moved, tokenizer)],
        paragraphs=[HOW_TO_READ],
        passages=passages(moved, tokenizer),
    )


def _logits_of_base(request: Request) -> "LogitsOfBase":
    """Return a function that computes the base's logits.

    Raises:
        ValueError: If the base cannot be loaded, is not in the model, or reads text as other tokens.
    """
    from midus_hf.analysis.inside.drift import base_within, other_base

    model, tokenizer = request.loaded
    if request.base == "self":
        return base_within(model)
    base, of_base = request.load(request.base, "base")
    if of_base.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"base is {request.base!r}, whose tokenizer has other tokens than the model's; expected one tokenizer."
        )
    return other_base(model, base)
