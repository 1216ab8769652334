"""The tasks of `tasks/*.yaml`: lm-evaluation-harness tasks whose questions lie in a local folder.

A task file names its data as `${DATA}/piqa.jsonl`; the folder is put in when the task is used.
"""

import re
import string
from pathlib import Path
from typing import Any

import yaml

from midus_hf.files.json_text import parse_json

PREFIX = "midus_"
_FOLDER = Path(__file__).parent / "tasks"
_FACTS = "facts"
"""The task whose rows a person writes."""


def local_task_names() -> list[str]:
    """The short names of the local tasks: `boolq`, `piqa` and so on. lm-eval knows them as `midus_boolq`."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_local_task(name: str, data: str | Path) -> dict[str, Any]:
    """Read a local task.

    Args:
        name: Short name.
        data: Folder that holds `NAME.jsonl`: a row per question, with `question`, `choices`, `gold`; of atomic numbers, an element
            with its `name` and its `number`; of facts, a `question` and its `answers`, a list of texts each of which is right.

    Returns:
        A task configuration that lm-eval takes as it is.

    Raises:
        ValueError: If the folder does not hold the questions, or a row of facts is none.
    """
    data = Path(data).resolve()
    if not (data / f"{name}.jsonl").is_file():
        raise ValueError(
            f"{data} holds no {name}.jsonl; expected a row of JSON per question: question, choices, gold "
            "(of atomic_numbers: name, number; of facts: question, answers)."
        )
    config = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    if name == _FACTS:
        _check_facts(data / f"{name}.jsonl", config)
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"]["data_files"] = {
        split: file.replace("${DATA}", str(data)) for split, file in files.items()
    }
    return config


def write_local_tasks(folder: str | Path, data: str | Path) -> list[Path]:
    """Write those local tasks whose questions a folder holds, with the folder put in, for `lm_eval --include_path FOLDER`.

    Returns:
        The files written.

    Raises:
        ValueError: If the folder holds the questions of none.
    """
    folder = Path(folder)
    held = [name for name in local_task_names() if _asks(Path(data) / f"{name}.jsonl", name)]
    if not held:
        raise ValueError(
            f"{Path(data).resolve()} holds the questions of no local task; expected files such as piqa.jsonl."
        )
    configs = {name: load_local_task(name, data) for name in held}
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in configs.items():
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        (folder / f"{PREFIX}{name}.yaml").write_text(text, encoding="utf-8")
    return [folder / f"{PREFIX}{name}.yaml" for name in configs]


def _asks(path: Path, name: str) -> bool:
    """Whether a file holds the questions of a task; one of facts may hold texts that say them, as that of elements does."""
    if not path.is_file() or name != _FACTS:
        return path.is_file()
    with path.open(encoding="utf-8") as file:
        first = _row(next(file, ""))
    return first is not None and "question" in first


def _check_facts(path: Path, config: dict[str, Any]) -> None:
    """Refuse rows that cannot be asked, and answers that nothing that is written could equal."""
    (first_clause, *_), ignored = config["filter_list"][0]["filter"], config["metric_list"][0]["regexes_to_ignore"]

    def compared(answer: str) -> str:
        return re.sub("|".join(ignored), "", answer, flags=re.IGNORECASE).strip(string.punctuation)

    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = _row(line) or {}
            question, answers = row.get("question"), row.get("answers")
            texts = answers if isinstance(answers, list) else []
            if not (
                isinstance(question, str) and question.strip() and texts and all(type(text) is str for text in texts)
            ):
                raise ValueError(
                    f"line {number} of {path} is {line.strip()[:80]!r}; expected an object of JSON with question, a text, and "
                    "answers, a list of texts each of which is right."
                )
            for answer in texts:
                (clause, *_) = re.findall(first_clause["regex_pattern"], answer)
                if not compared(answer) or compared(clause) != compared(answer):
                    raise ValueError(
                        f"line {number} of {path} has the answer {answer!r}; expected more than articles and punctuation, and no "
                        "commas, semicolons, brackets or full stops, behind which nothing counts. Give what stands before them."
                    )


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
