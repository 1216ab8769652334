"""`midus look values`: the tokens nearest to what slots of a memory add, or to what its chapters hold."""

import dataclasses
from typing import TYPE_CHECKING

from midus_hf.cli.look.request import QUESTIONS, READING, Request
from midus_hf.cli.look.usage import TextUsage, count_usage

if TYPE_CHECKING:
    from midus_hf.analysis.answer import Answer

HOW_TO_READ = "What a slot adds is read through the model's final norm and head, as if it were all that is added: a probe, no proof."
# Number of slots that are shown by default.
_MOST_SLOTS = 10


@QUESTIONS.register(
    "values",
    "tokens nearest to what slots add, or --chapters hold",
    (*READING, "memory", "layers", "heads", "slots", "chapters", "rows", "top", "tokens"),
)
def values(request: Request) -> "Answer":
    """Answer which tokens are nearest to what slots or chapters hold, read through the model's own head."""
    if request.chapters is not None:
        return values_of_chapters(request)
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
    assert request.documents is not None
    from midus_hf.analysis.slots.slot_tokens import memory_of_slots

    model, _ = request.loaded
    layer = request.one_number("layers", model.config.get_text_config().num_hidden_layers)
    assert layer is not None
    hosted = memory_of_slots(model, layer, request.memory)
    slots = request.numbers("slots", hosted.module.num_slots)
    used = count_usage(request, memory=None) if request.documents else None
    return values_of_slots(request, layer, hosted.name, slots, used)


def values_of_slots(
    request: Request,
    layer: int,
    memory: str,
    slots: tuple[int, ...] | None,
    used: TextUsage | None,
    most: int | None = None,
) -> "Answer":
    """Return the tokens nearest to what slots of one memory add.

    Args:
        layer: Index of the decoder layer.
        memory: Name of the memory in the layer.
        slots: Numbers of the slots. None: the most used slots.
        used: Usage of the slots by texts. None: unknown, in which case `slots` are required.
        most: Number of slots to show. Default: `request.top`, or 10.
    """
    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.slots.slot_tokens import memory_of_slots, slot_tokens, slots_table
    from midus_hf.analysis.slots.usage import Usage

    model, tokenizer = request.loaded
    hosted = memory_of_slots(model, layer, memory)
    near = slot_tokens(
        model,
        tokenizer,
        layer,
        head=request.one_number("heads", hosted.module.num_heads),
        slots=slots,
        usage=None if used is None else Usage(used.total()),
        most=most or (_MOST_SLOTS if request.top is None else request.top),
        top=request.tokens,
        memory=memory,
    )
    return Answer(
        title=f"What slots add in layer {hosted.place}",
        summary=HOW_TO_READ,
        report={
            "model": request.model,
            "layer": layer,
            "memory": hosted.name,
            "slots": [dataclasses.asdict(of_slot) for of_slot in near],
        },
        tables=[slots_table(near, hosted.place)],
    )


def values_of_chapters(request: Request) -> "Answer":
    """Return the tokens nearest to the rows of chapters."""
    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.chapters.memories import one_memory
    from midus_hf.analysis.chapters.tables import nearest_table
    from midus_hf.analysis.chapters.tokens import nearest_tokens

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
        summary=HOW_TO_READ.replace("a slot adds", "a chapter holds"),
        report={"model": request.model, "chapters": [dataclasses.asdict(of_chapter) for of_chapter in near]},
        tables=[nearest_table(near)],
    )
