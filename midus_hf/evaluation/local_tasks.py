"""Local tasks (`tasks/*.yaml`): tasks of lm-evaluation-harness whose questions are in a local folder.

A task file names its data as `${DATA}/piqa.jsonl`; the folder replaces `${DATA}` when the task is loaded.
"""

import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from midus_hf.config.errors import RequestError
from midus_hf.data.corpus import read_rows, refuse_pointers
from midus_hf.files.json_text import parse_json

PREFIX = "midus_"
_FOLDER = Path(__file__).parent / "tasks"
# Name of the task whose rows are written by users.
_FACTS = "facts"


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
        _check_facts(data / f"{name}.jsonl", config)
    read_rows("data", str(data / f"{name}.jsonl"))  # before any model is loaded
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"]["data_files"] = {
        split: file.replace("${DATA}", str(data)) for split, file in files.items()
    }
    return config


def _check_facts(path: Path, config: dict[str, Any]) -> None:
    """Refuse rows that are not a question with answers, and answers that no generated text could equal."""
    first_clause, *_ = config["filter_list"][0]["filter"]
    with path.open(encoding="utf-8-sig", errors="replace") as file:  # the reader refuses what is no text
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            question, answers = (row.get("question"), row.get("answers")) if isinstance(row, dict) else (None, None)
            has_answers = isinstance(answers, list) and answers and all(type(each) is str for each in answers)
            if not isinstance(question, str) or not question.strip() or not has_answers:
                raise RequestError(
                    f"line {number} of {path} is {line.strip()[:80]!r}; expected an object of JSON with question, a text, and "
                    "answers, a list of texts each of which is right."
                )
            for answer in answers or ():
                (clause, *_) = re.findall(first_clause["regex_pattern"], answer)
                compared = _compared_part(config, answer)
                if not compared or _compared_part(config, clause) != compared:
                    raise RequestError(
                        f"line {number} of {path} has the answer {answer!r}; expected more than articles and punctuation, and no "
                        "commas, semicolons, brackets or full stops, after which no text counts. Give the text before them."
                    )


def _compared_part(config: Mapping[str, Any], answer: str) -> str:
    """Return the part of an answer that is compared, without what the task's configuration ignores."""
    ignored = "|".join(config["metric_list"][0]["regexes_to_ignore"])
    return re.sub(ignored, "", answer, flags=re.IGNORECASE).strip(string.punctuation)
