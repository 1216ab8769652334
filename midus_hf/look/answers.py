"""Check of a glossary by questions as people ask them: whether a model with packs answers rightly, beside the texts in front."""

from collections.abc import Sequence
from typing import Any

from midus_hf.config.errors import RequestError
from midus_hf.data.corpus import read_rows
from midus_hf.evaluation.answers import has_answer as has
from midus_hf.evaluation.asking import greedy_answer, question_inputs
from midus_hf.look.glossary import packs_of, worst_rows
from midus_hf.look.page import Row, TextTable
from midus_hf.memories.hosting.layer import without_memories
from midus_hf.memories.packs.glossary import Glossary
from midus_hf.sources.progress import show_progress

HOW_TO_READ = (
    "The model answers each question greedily, in its chat template if it has one, after the name of an entry that the question "
    "has, on a line; without a template after those of all entries that it has. An answer is right if it contains the expected one, "
    "in any case, and not as a part of a word; numbers are compared as numbers. Without packs: the same with the packs switched off. "
    "Text in front: with the whole texts of those entries before the question, and the packs switched off. Read as: names that the "
    "question has with other separators or an s."
)
_COLUMNS = {
    "question": "{question}",
    "right": "{right}",
    "without packs": "{without}",
    "text in front": "{front}",
    "expected": "{answer}",
    "said": "{said}",
    "read as": "{read_as}",
}
_ANSWER_TOKENS = 40


def check_questions(model: Any, tokenizer: Any, name: str, questions: Sequence[Row]) -> list[Row]:
    """Ask a model questions about its glossary: with packs, without, and with the texts of entries in front.

    Args:
        model: A model with packs, which `from_pretrained` loaded.
        tokenizer: Its tokenizer.
        name: Its name, for messages.
        questions: Rows with `question` and `answer`, as `read_questions` returns them.

    Returns:
        A record per question with `question`, `answer`, whether the model's answer is `right`, also `without` packs and with the text
        in `front`, what it `said` with packs, and which names it has in another form (`read_as`). Those that are wrong come first.

    Raises:
        RequestError: If the model has no packs, or cannot be asked a question.
    """
    stack, service = packs_of(model)
    glossary: Glossary = model.glossary
    plain = tokenizer.chat_template is None
    rows: list[Row] = []
    for row in show_progress(questions, desc="questions"):
        question, expected = row["question"], row["answer"]
        ids = glossary.spelling.ids(question)
        named, forms = [glossary[number] for number in glossary.named(ids)], glossary.forms(ids)
        names = glossary.names_in_front(question, in_chat=not plain)
        texts = "".join(f"{entry.text}\n\n" for entry in named)
        said = {}
        for key, in_front in (("packs", names), ("without", names), ("front", texts)):
            with without_memories(stack.layers, [] if key == "packs" else [service.name]):
                inputs = question_inputs(model, tokenizer, in_front + question, name=name, plain=plain)
                answer = tokenizer.decode(greedy_answer(model, inputs, _ANSWER_TOKENS), skip_special_tokens=True)
            said[key] = " ".join(answer.split())
        right, without, front = (has(answer, expected) for answer in said.values())
        rows.append(
            {
                "question": question,
                "answer": expected,
                "right": right,
                "without": without,
                "front": front,
                "said": said["packs"],
                "read_as": ", ".join(f"{form}: {glossary[number].names[0]}" for form, number in forms.items()),
            }
        )
    return sorted(rows, key=lambda row: row["right"])


def read_questions(path: str, limit: int | None = None) -> list[Row]:
    """Return the questions of a file or folder of rows, and the answer that each expects.

    Args:
        path: Rows (JSON lines, CSV or Parquet) with the columns `question` and `answer`, which are texts.
        limit: Number of questions, the first ones. Default: all.

    Raises:
        RequestError: If the rows cannot be read, or one has no question or answer.
    """
    rows = read_rows("questions", path)
    for column in ("question", "answer"):
        if column not in rows.column_names:
            raise RequestError(
                f"questions is {path!r}, whose rows have {', '.join(rows.column_names) or 'nothing'}; expected the columns "
                "question and answer. Rename them."
            )
    for number, row in enumerate(rows, 1):
        for column in ("question", "answer"):
            if not isinstance(row[column], str) or not has(row[column], row[column]):
                raise RequestError(
                    f"row {number} of {path!r} has {row[column]!r} under {column!r}; expected a text. Write it, or remove the row."
                )
    read: list[Row] = [
        {"question": row["question"].strip(), "answer": " ".join(row["answer"].split())} for row in rows
    ]
    return read[:limit]


def questions_table(rows: Sequence[Row]) -> TextTable:
    """Return the rows of `check_questions`, the wrong ones first, as a table."""
    told = [{**row, **{key: "yes" if row[key] else "no" for key in ("right", "without", "front")}} for row in rows]
    return worst_rows("What the model answers to questions about the entries", told, _COLUMNS)


def questions_finding(rows: Sequence[Row]) -> str:
    """Return in a sentence how many questions are answered rightly."""
    right, without, front = (sum(row[key] for row in rows) for key in ("right", "without", "front"))
    return f"{right:,} of {len(rows):,} answers are right with packs, {without:,} without, {front:,} with the text in front."
