"""`midus look heads`: how much each head of attention matters for the right answers of tasks."""

from typing import TYPE_CHECKING

from midus_hf.cli.command_line import WRONG_REQUEST, Ending
from midus_hf.cli.look.request import QUESTIONS, Request

if TYPE_CHECKING:
    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.inside.head_importance import HeadImportance

_TAKES = ("tasks", "data", "include_path", "limit", "signed", "dtype", "device")


@QUESTIONS.register("heads", "how much each head matters for answers of tasks", _TAKES, ("tasks",))
def heads(request: Request) -> "Answer":
    """Answer how much each head of attention matters for right answers, and how much heads of a layer differ in that."""
    if request.limit is not None and request.limit < 1:
        raise ValueError(f"limit is {request.limit}; expected at least 1.")
    names = [name.strip() for name in (request.tasks or "").split(",") if name.strip()]
    try:
        importances = _importances(request, names)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("lm_eval", "datasets"):
            raise
        reason = f"tasks need lm-evaluation-harness ({error.name} is missing): pip install 'midus-hf[eval]'"
        raise Ending(WRONG_REQUEST, reason) from error
    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.inside.head_report import as_json, draw_heads, layers_table
    from midus_hf.short_names import short_names

    labelled = dict(zip(short_names(list(importances)), importances.values(), strict=True))
    return Answer(
        title="How much heads matter",
        summary=f"{', '.join(labelled)} answered {', '.join(names)}.",
        report={"tasks": names, "limit": request.limit, "models": as_json(importances)},
        tables=[layers_table(label, one, not request.signed) for label, one in labelled.items()],
        pictures={"Importance of heads": lambda: draw_heads(labelled, not request.signed)},
    )


def _importances(request: Request, names: list[str]) -> "dict[str, HeadImportance]":
    from tqdm import tqdm

    from midus_hf.analysis.inside.head_importance import head_importance, task_answers
    from midus_hf.evaluation.harness import Tasks
    from midus_hf.evaluation.quiet import quiet_libraries

    importances = {}
    with quiet_libraries():
        tasks = Tasks(names, data=request.data, include_path=request.include_path)
        for model in request.models:
            loaded, tokenizer = request.load(model)
            answers = list(task_answers(loaded, tokenizer, tasks, request.limit))
            with tqdm(desc=model, total=len(answers), unit=" answers", disable=None) as bar:
                importances[model] = head_importance(loaded, answers, bar.update)
    return importances
