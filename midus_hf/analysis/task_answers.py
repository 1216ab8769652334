"""Questions of lm-evaluation-harness with their right answers, as tokens. Needs lm-eval, which is an extra."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.analysis.inside.head_importance import Answer
from midus_hf.evaluation.harness import MidusLM, Tasks


def task_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Tasks, limit: int | None = None
) -> Iterator[Answer]:
    """Each question of some tasks with its right answer, as the harness would score it, without worked examples.

    Args:
        model: Whose tokens they are.
        tokenizer: Its own.
        tasks: Of choices, or of what is written.
        limit: Questions per task, the first ones. Default: all.

    Raises:
        ValueError: If a task is of another kind, or a question has several right answers or none that is known.
    """
    import torch

    harness = MidusLM(model, tokenizer=tokenizer, batch_size=1)
    for name, task in tasks.built().items():
        if task.OUTPUT_TYPE not in ("multiple_choice", "generate_until"):
            raise ValueError(
                f"task {name!r} is of {task.OUTPUT_TYPE}; expected one of choices, or of what is written."
            )
        for document in list(task.eval_docs)[:limit]:
            context = task.fewshot_context(document, num_fewshot=0)
            prompt, answer = harness._encode_pair(context, _right_answer(name, task, document))
            yield Answer(torch.tensor([*prompt, *answer]), len(prompt))


def _right_answer(name: str, task: Any, document: Any) -> str:
    """With the space in front that stands between a prompt and its answer."""
    target = task.doc_to_target(document)
    if task.OUTPUT_TYPE == "multiple_choice":
        if not isinstance(target, int) or target < 0:
            raise ValueError(
                f"task {name!r} has a question whose right choice is {target!r}; expected the number of one."
            )
        target = task.doc_to_choice(document)[target]
    if isinstance(target, list) and target:
        target = target[0]
    if not isinstance(target, str) or not target:
        raise ValueError(f"task {name!r} has a question whose answer is {target!r}; expected a text.")
    return f"{task.config.target_delimiter}{target}"
