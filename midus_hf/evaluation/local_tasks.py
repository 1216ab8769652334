"""Local tasks (`tasks/*.yaml`): tasks of lm-evaluation-harness whose questions are in a local folder.

A task file names its data as `${DATA}/piqa.jsonl`; the folder replaces `${DATA}` when the task is loaded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import regex
import yaml

from midus_hf.config.errors import RequestError
from midus_hf.data.corpus import read_rows, refuse_pointers
from midus_hf.evaluation.answers import has_answer, read_numbers
from midus_hf.files.json_text import parse_json

PREFIX = "midus_"
_FOLDER = Path(__file__).parent / "tasks"
# Name of the task whose rows are written by users.
_FACTS = "facts"
# Where a clause may end: at signs, but not within a number (1,000 or 10:30) or before a letter (.com), except for wide signs.
_CLAUSE_END = regex.compile(
    r"[,;](?!\d)|[\p{Terminal_Punctuation}--[,;]](?!\w)|[\p{Terminal_Punctuation}--\p{ASCII}]"
    r"|\p{Open_Punctuation}|\s\p{Dash}\s|\u2014|\n|$",
    regex.V1,
)


def local_task_names() -> list[str]:
    """Return the short names of the local tasks, such as `boolq`. lm-eval knows this task as `midus_boolq`."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_local_task(name: str, data: str | Path) -> dict[str, Any]:
    """Read a local task."""
    data = Path(data).resolve()
    if not (data / f"{name}.jsonl").is_file():
        raise RequestError(
            f"{data} has no {name}.jsonl; expected a row of JSON per question: question, choices, gold "
            "(of atomic_numbers: name, number; of facts: question, answers)."
        )
    refuse_pointers("data", [data / f"{name}.jsonl"])
    config = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    if name == _FACTS:
        _check_facts(data / f"{name}.jsonl")
    read_rows("data", str(data / f"{name}.jsonl"))  # before any model is loaded
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"]["data_files"] = {
        split: file.replace("${DATA}", str(data)) for split, file in files.items()
    }
    if name in _JUDGES:
        config["process_results"] = _JUDGES[name]
    return config


def _judge_fact(row: dict[str, Any], written: Sequence[str]) -> dict[str, float]:
    """Return whether what is written up to the end of a clause is one of the answers, which may be longer than a clause."""
    clauses = [written[0][: end.start()] for end in _CLAUSE_END.finditer(written[0])]
    is_right = any(has_answer(clause, answer, "whole") for clause in clauses for answer in row["answers"])
    return {"exact_match": float(is_right)}


def _judge_atomic_number(row: dict[str, Any], written: Sequence[str]) -> dict[str, float]:
    """Return whether the first whole number that is written is the right one."""
    found = next((number for number in read_numbers(written[0]) if number == number.to_integral_value()), None)
    return {"exact_match": float(found is not None and found in read_numbers(str(row["number"])))}


_JUDGES = {_FACTS: _judge_fact, "atomic_numbers": _judge_atomic_number}


def _check_facts(path: Path) -> None:
    """Refuse rows that are not a question with answers."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:  # the reader refuses what is no text
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            question, answers = (row.get("question"), row.get("answers")) if isinstance(row, dict) else (None, None)
            are_answers = isinstance(answers, list) and all(
                type(each) is str and has_answer(each, each) for each in answers
            )
            if not isinstance(question, str) or not question.strip() or not answers or not are_answers:
                raise RequestError(
                    f"line {number} of {path} is {line.strip()[:80]!r}; expected an object of JSON with question, a text, and "
                    "answers, a list of texts, none of them empty, each of which is right."
                )
