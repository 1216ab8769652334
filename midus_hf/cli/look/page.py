"""`midus look page`: all answers that texts give about one model, on one page."""

from typing import TYPE_CHECKING

from midus_hf.cli.look.depth import depth
from midus_hf.cli.look.effects import moved_predictions, without_parts
from midus_hf.cli.look.request import QUESTIONS, READING, Request
from midus_hf.cli.look.usage import can_count, count_usage, usage_answer
from midus_hf.cli.look.values import values_of_chapters, values_of_slots

if TYPE_CHECKING:
    from midus_hf.analysis.answer import Answer

# Number of slots of each memory that the page shows.
_MOST_SLOTS = 3


@QUESTIONS.register("page", "all of these but heads, on one page", (*READING, "base", "top"), ("text",))
def page(request: Request) -> "Answer":
    """Answer every question that texts answer about the model: usage, ablation, drift, reading of the depth, and values."""
    assert request.documents
    request.check_base()
    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.slots.slot_tokens import memories_of_slots
    from midus_hf.analysis.slots.usage import uncounted_memories

    model, _ = request.loaded
    types = uncounted_memories(model)
    answers: dict[str, Answer] = {}
    used = count_usage(request, memory=None) if can_count(request) else None
    if used is not None:
        answers["usage"] = usage_answer(request, used)
    answers["ablation"] = without_parts(request)
    answers["drift"] = moved_predictions(request)
    if "depth-attention" in types and len(request.documents) == 1:
        answers["depth"] = depth(request)
    for hosted in memories_of_slots(model) if used is not None else ():
        near = values_of_slots(request, hosted.layer, hosted.name, None, used, most=_MOST_SLOTS)
        answers[f"values of layer {hosted.place}"] = near
    if "chapters" in types:
        answers["values of chapters"] = values_of_chapters(request)
    return Answer(
        title="Inside the model",
        summary=f"{request.model}, on {', '.join(request.documents)}.",
        report={name: answer.report for name, answer in answers.items()},
        tables=[table for answer in answers.values() for table in answer.tables],
        sections=list(answers.values()),
    )
