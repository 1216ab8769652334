"""Checks of a task's questions before a model answers them: what the harness would count as wrong for any model is refused."""

import itertools
import re
from collections.abc import Iterator
from numbers import Integral
from pathlib import Path
from typing import Any

from lm_eval.api.task import ConfigurableTask

from midus_hf.config.errors import RequestError
from midus_hf.evaluation.answers import has_answer
from midus_hf.files.checkpoint_files import parse_json

_COLUMN = re.compile(r"{{\s*(\w+)")
_LETTERED_CHOICE = re.compile(r"{{choices\[(\d+)\]}}")


def check_facts(path: Path) -> None:
    """Refuse a line of a file that is no question with texts as right answers."""
    for number, line, row in _lines(path):
        question, answers = row.get("question"), row.get("answers")
        are_answers = isinstance(answers, list) and all(
            type(each) is str and has_answer(each, each) for each in answers
        )
        if not _is_filled(question) or not isinstance(question, str) or not answers or not are_answers:
            raise RequestError(
                f"line {number} of {path} is {line[:80]!r}; expected an object of JSON with question, a text, and "
                "answers, a list of texts, none of them empty, each of which is right."
            )


def check_questions(path: Path, task: dict[str, Any]) -> None:
    """Refuse a line of a local task's file that lacks a column of the prompt, or whose label names no choice.

    Args:
        path: The file, a row of JSON per line.
        task: The task's config.
    """
    prompt = task["doc_to_text"]
    choices_key = task.get("doc_to_choice")
    columns = dict.fromkeys(_COLUMN.findall(prompt))
    in_prompt = len(_LETTERED_CHOICE.findall(prompt))
    for number, line, row in _lines(path):
        missing = [column for column in columns if not _is_filled(row.get(column))]
        if missing:
            raise RequestError(
                f"line {number} of {path} is {line[:80]!r}, without {' and '.join(missing)}; expected an object of JSON with "
                f"{', '.join(columns)}. Complete or remove the line."
            )
        if choices_key is None:
            continue
        written: Any = row.get("choices")
        are_choices = isinstance(written, list) and len(written) > 1 and all(map(_is_filled, written))
        if (in_prompt or choices_key == "choices") and not (
            are_choices and len(written) == (in_prompt or len(written))
        ):
            expected = f"{in_prompt} choices" if in_prompt else "two choices or more"
            raise RequestError(
                f"line {number} of {path} has the choices {written!r:.80}; expected {expected}, none of them empty."
            )
        _check_label(f"line {number} of {path}", row.get("gold"), written if choices_key == "choices" else choices_key)


def check_labels(name: str, task: Any, limit: int | None = None) -> None:
    """Refuse a question of one of the harness's tasks, the first `limit`, whose label names none of its choices."""
    counts_labels = (
        type(task).process_results is ConfigurableTask.process_results and task.config.process_results is None
    )
    if task.OUTPUT_TYPE != "multiple_choice" or not counts_labels:  # a task's own code may read labels in another way
        return
    label_of = task.doc_to_text if task.multiple_input else task.doc_to_target
    for number, document in enumerate(itertools.islice(task.eval_docs, limit), start=1):
        labels = label_of(document)
        for label in labels if isinstance(labels, list) else [labels]:
            _check_label(f"question {number} of task {name!r}", label, task.doc_to_choice(document))


def _check_label(subject: str, label: Any, choices: list[str]) -> None:
    is_number = isinstance(label, Integral) and label in range(len(choices))
    if not is_number and not (isinstance(label, str) and label in choices):
        raise RequestError(
            f"{subject} has the gold {label!r:.80}, which names none of its choices {choices!r:.80}; expected a number from 0 to "
            f"{len(choices) - 1}, or the text of a choice. Repair or remove it."
        )


def _is_filled(value: Any) -> bool:
    return value is not None and value != [] and (not isinstance(value, str) or bool(value.strip()))


def _lines(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the number, the text and the row, empty without one, of each line that is not blank."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:  # the reader refuses what is no text
        for number, line in enumerate(file, start=1):
            try:
                row = parse_json(line) if line.strip() else None
            except ValueError:
                row = None
            if line.strip():
                yield number, line.strip(), row if isinstance(row, dict) else {}
