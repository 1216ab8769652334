"""Local tasks of edited knowledge: did a model learn new facts, in other words too, and are facts nearby as they were?

The papers published the files: `counterfact.json` (ROME, arXiv 2202.05262) and `zsre.json` (MEND's questions of zsRE, as in
ROME), lists of objects. Each file gives three tasks:

| task | question | right |
|---|---|---|
| `counterfact_efficacy` | the edited prompt | the new object is likelier than the true one |
| `counterfact_paraphrase` | two paraphrases each | as above |
| `counterfact_neighborhood` | prompts about other subjects with the same true object | the true object is likelier |
| `zsre_efficacy` | the edited question | the model continues with the new answer |
| `zsre_paraphrase` | the rephrased question | as above |
| `zsre_neighborhood` | an unrelated question | the model continues with that question's own answer |
"""

import re
import string
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from midus_hf.topics.corpus import read_rows

KINDS = ("efficacy", "paraphrase", "neighborhood")
EDIT_TASKS = tuple(f"{source}_{kind}" for source in ("counterfact", "zsre") for kind in KINDS)


def edit_task(name: str, data: Path, answering: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of one of `EDIT_TASKS` for lm-eval.

    Args:
        name: Name of the task.
        data: Folder that holds the file of the source.
        answering: Configuration of a task of questions with `answers`, which a zsRE task extends.

    Raises:
        ValueError: If the folder does not hold the file, or if an edit is of another format.
    """
    source, kind = name.split("_")
    file = data / f"{source}.json"
    if not file.is_file():
        raise ValueError(
            f"{data} holds no {file.name}; expected the file of {source} as its authors published it, a list of objects of JSON."
        )
    process = partial(_questions, _ROWS[source], kind, answering)
    process(read_rows("data", str(file)))  # before any model is loaded
    choosing = {
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
        ],
    }
    return {
        **(choosing if source == "counterfact" else answering),
        "task": f"midus_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "process_docs": process,
        "metadata": {"version": 1.0},
    }


def is_question(row: Mapping[str, Any]) -> bool:
    """Return whether a row has a `question`, a text, and `answers`, a list of texts."""
    question, answers = row.get("question"), row.get("answers")
    texts = answers if isinstance(answers, list) else []
    return isinstance(question, str) and bool(question.strip() and texts) and all(type(text) is str for text in texts)


def compared_answer(answering: Mapping[str, Any], answer: str) -> str:
    """Return what of an answer is compared, without what the configuration of its task ignores."""
    ignored = "|".join(answering["metric_list"][0]["regexes_to_ignore"])
    return re.sub(ignored, "", answer, flags=re.IGNORECASE).strip(string.punctuation)


def _questions(
    rows_of: Callable[[dict[str, Any], str], Iterator[dict[str, Any]]],
    kind: str,
    answering: Mapping[str, Any],
    edits: Any,
) -> Any:
    """Return the questions of one kind as a dataset, a row each.

    Raises:
        ValueError: If an edit lacks a key of its format, or a value is of another format; or if no text could be an answer.
    """
    from datasets import Dataset

    rows: list[dict[str, Any]] = []
    for number, edit in enumerate(edits):
        try:
            for row in rows_of(edit, kind):
                if "answers" in row and not (
                    is_question(row) and all(compared_answer(answering, answer) for answer in row["answers"])
                ):
                    raise ValueError(
                        f"it asks {row['question']!r}, and its answers are {row['answers']!r}; expected a question and a list of "
                        "texts, each more than articles and punctuation. Fill them in."
                    )
                rows.append(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"edit {number} of the file has no usable {error}; expected the format of the authors."
            ) from error
        except ValueError as error:
            raise ValueError(f"edit {number} of the file: {error}") from error
    return Dataset.from_list(rows)


def _counterfact(edit: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    rewrite = edit["requested_rewrite"]
    prompt = rewrite["prompt"]
    if prompt.count("{}") != 1:
        raise ValueError(f"prompt is {prompt!r}; expected one {{}}, for the subject. Correct it there.")
    prompts = {
        "efficacy": [prompt.replace("{}", rewrite["subject"])],
        "paraphrase": edit["paraphrase_prompts"],
        "neighborhood": edit["neighborhood_prompts"],
    }
    choices = [rewrite["target_true"]["str"], rewrite["target_new"]["str"]]
    for prompt in prompts[kind]:
        yield {"question": prompt, "choices": choices, "gold": 0 if kind == "neighborhood" else 1}


def _zsre(edit: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    if kind == "neighborhood":
        # The unrelated questions of zsRE are of Natural Questions, whose name stands in front in the file.
        question = edit["loc"].removeprefix("nq question: ").removesuffix("?")
        yield {"question": f"{question}?", "answers": [edit["loc_ans"]]}
    else:
        if isinstance(edit["answers"], str):
            raise ValueError(f"answers is {edit['answers']!r}; expected a list. Put it in brackets.")
        yield {"question": edit["src" if kind == "efficacy" else "rephrase"], "answers": list(edit["answers"])}


_ROWS: dict[str, Callable[[dict[str, Any], str], Iterator[dict[str, Any]]]] = {
    "counterfact": _counterfact,
    "zsre": _zsre,
}
