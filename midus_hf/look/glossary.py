"""Checks of a glossary: whether a model with packs has its texts, answers questions and finds names."""

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import regex
import torch

from midus_hf.config.errors import RequestError
from midus_hf.data.corpus import read_rows
from midus_hf.evaluation.answers import SPACED, has_answer
from midus_hf.evaluation.asking import greedy_answer, question_inputs
from midus_hf.look.page import Row, TextTable, table_of
from midus_hf.memories.hosting.layer import without_memories
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.memories.packs.glossary import Glossary
from midus_hf.memories.packs.kept_readings import keep_readings
from midus_hf.memories.packs.names import names_in
from midus_hf.models.view import lacking
from midus_hf.sources.progress import show_progress

HOW_TO_READ = (
    "A value is a number or a capitalised word within a sentence of an entry's text. It comes back if its tokens are the likeliest "
    "ones after the entry's name, a line break, and the sentence up to the value. Without packs: the same with the packs switched "
    "off. Text in front: with the entry's whole text in place of the name, and the packs switched off. Not found: ways of "
    "writing a name that open nothing. Also with: other forms that open it, unless another entry or a frequent word has the form. "
    "Within: names of other entries that contain a name of this one, and are used instead."
)
# Rows of the table, the worst entries first; files of --output have all.
_MAX_ROWS = 30
_COLUMNS = {
    "entry": "{entry}",
    "values": "{values}",
    "come back": "{right}",
    "without packs": "{without}",
    "text in front": "{front}",
    "lost": "{lost}",
    "not found": "{not_found}",
    "also with": "{also_with}",
    "within": "{within}",
}
HOW_TO_READ_ANSWERS = (
    "The model answers each question greedily, in its chat template if it has one, after the name of an entry that the question "
    "has, on a line; without a template after those of all entries that it has. An answer is right if it contains the expected one, "
    "in any case, and not as a part of a word; numbers are compared as numbers. Without packs: the same with the packs switched off. "
    "Text in front: with the whole texts of those entries before the question, and the packs switched off. Read as: names that the "
    "question has with other separators or an s."
)
_QUESTION_COLUMNS = {
    "question": "{question}",
    "right": "{right}",
    "without packs": "{without}",
    "text in front": "{front}",
    "expected": "{answer}",
    "said": "{said}",
    "read as": "{read_as}",
}
_ANSWER_TOKENS = 40
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
# A number with its separators, or a word of a script that writes spaces between words.
_VALUE = regex.compile(rf"\d+(?:[.,:/\-]\d+)*|{SPACED}(?:{SPACED}|[\p{{M}}_'\-])*", regex.V1)
_WRITINGS: Mapping[str, Callable[[str], str]] = {
    "lower case": str.lower,
    "capitals": str.upper,
    "quotes": "'{}'".format,
    "brackets": "({})".format,
    "a comma": "{},".format,
    "decomposed": lambda name: unicodedata.normalize("NFD", name),
    "no-break spaces": lambda name: name.replace(" ", "\u00a0"),
}
# Forms in which people type names, which have the entry if the name is not exact.
_FORMS: Mapping[str, Callable[[str], str]] = {
    "other separators": lambda name: name.translate(str.maketrans(" _-", "_  ")),
    "an s": "{}s".format,
    "Korean particles": lambda name: re.sub("(?<=[\uac00-\ud7a3])$", "\ub294", name),
}


class Value(NamedTuple):
    """A value in an entry's text: the sentence before it, and the value with the space before it."""

    prompt: str
    text: str


def check_glossary(model: Any, limit: int | None = None, batch_size: int = 4) -> list[Row]:
    """Check whether a model reproduces the values of its glossary's entries and finds their names.

    Args:
        model: A model with packs, which `from_pretrained` loaded.
        limit: Number of entries, the first ones. Default: all.
        batch_size: Values per forward pass. Default: 4.

    Returns:
        Records of entries, those with the most missing values first, with the first name as `entry`; the number of `values`, and
        those that come back with packs (`right`), `without`, and with the text in `front`; those `lost`; spellings of names that are
        `not_found`; forms that it is `also_with`; and names of other entries that it is `within`.

    Raises:
        RequestError: If the model has no packs.
    """
    stack, service = packs_of(model)
    glossary: Glossary = model.glossary
    numbered = glossary.items()[:limit]
    values = [values_of(entry.text, entry.names) for _, entry in numbered]
    named = [f"{entry.names[0]}\n" for _, entry in numbered]
    texts = [f"{entry.text}\n\n" for _, entry in numbered]
    right: dict[str, list[list[bool]]] = {}
    for key, fronts in (("packs", named), ("without", named), ("front", texts)):
        asked = [(front + each.prompt, each.text) for its, front in zip(values, fronts, strict=True) for each in its]
        switched_off = [] if key == "packs" else [service.name]
        with keep_readings(model, check_numbers=False), without_memories(stack.layers, switched_off):
            bar = show_progress(total=len(asked), desc=key, unit=" values")
            answers = iter([*_likeliest(model, glossary.spelling.tokenizer, asked, batch_size, bar)])
        right[key] = [[next(answers) for _ in its] for its in values]
    holding = _holding(glossary)
    rows: list[Row] = []
    for at, (number, entry) in enumerate(numbered):
        tried, forms = _try(glossary, number, _WRITINGS), _try(glossary, number, _FORMS)
        lost = [value.text.strip() for value, back in zip(values[at], right["packs"][at], strict=True) if not back]
        rows.append(
            {
                "entry": entry.names[0],
                "values": len(values[at]),
                "right": sum(right["packs"][at]),
                "without": sum(right["without"][at]),
                "front": sum(right["front"][at]),
                "lost": ", ".join(lost),
                "not_found": ", ".join(f"{written} ({way})" for written, way, is_found in tried if not is_found),
                "also_with": ", ".join(dict.fromkeys(way for _, way, is_found in forms if is_found)),
                "within": ", ".join(holding.get(number, [])),
            }
        )
    return sorted(rows, key=lambda row: (row["right"] / max(1, row["values"]), -row["values"]))


def packs_of(model: Any) -> tuple[Any, Any]:
    """Return the decoder of a model, and its service with the files of the glossary."""
    stack = decoder_of(model)
    service = getattr(stack, "services", {}).get("glossary")
    if service is None:
        raise lacking(model, "is a glossary (packs)")
    return stack, service


def values_of(text: str, names: Sequence[str]) -> list[Value]:
    """Return the numbers and names in the sentences of a text, except the names of the entry."""
    name_words = {word for name in names for word in re.findall(r"\w+", name.lower())}
    values = []
    for sentence in filter(None, map(str.strip, _SENTENCE_END.split(text))):
        for found in _VALUE.finditer(sentence):
            before = sentence[: found.start()]
            word = found[0]
            is_value = word[0].isdigit() or word[0].isupper()
            if is_value and re.search(r"\w", before) and not name_words & {*re.findall(r"\w+", word.lower())}:
                prompt = before.rstrip()
                values.append(Value(prompt, before[len(prompt) :] + word))
    return values


def _try(glossary: Glossary, number: int, ways: Mapping[str, Callable[[str], str]]) -> Iterator[tuple[str, str, bool]]:
    """Yield what ways of writing make of the names of an entry, the way, and whether that opens the entry."""
    tried: set[str] = set()
    for name, (way, write) in itertools.product(glossary[number].names, ways.items()):
        written = write(name)
        if written != name and written not in tried:
            tried.add(written)
            yield written, way, number in glossary.named(glossary.spelling.ids(f"of {written} is"))


def _holding(glossary: Glossary) -> dict[int, list[str]]:
    """Return the names of other entries that contain a name of an entry, by its number."""
    holding: dict[int, list[str]] = {}
    for number, entry in glossary.items():
        for name in entry.names:
            (found,) = names_in(glossary.index, [name.encode()])
            for other in {match.entry for match in found.opens} - {number}:
                holding.setdefault(other, []).append(name)
    return holding


@torch.no_grad()
def _likeliest(
    model: Any, tokenizer: Any, asked: Sequence[tuple[str, str]], batch_size: int, bar: Any
) -> Iterator[bool]:
    """Yield whether the tokens of each value are the likeliest ones after its prompt."""
    for first in range(0, len(asked), batch_size):
        part = asked[first : first + batch_size]
        whole = tokenizer([prompt + value for prompt, value in part], return_offsets_mapping=True, verbose=False)
        longest = max(map(len, whole["input_ids"]))
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(whole["input_ids"]):
            ids[row, : len(each)] = torch.tensor(each)
            mask[row, : len(each)] = 1
        inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
        likeliest = model(**inputs, use_cache=False).logits.argmax(-1).cpu()
        for row, (prompt, _) in enumerate(part):
            within = [at for at, (_, end) in enumerate(whole["offset_mapping"][row]) if end > len(prompt)]
            yield all(likeliest[row, at - 1] == ids[row, at] for at in within)
        bar.update(len(part))
    bar.close()


def glossary_table(rows: Sequence[Row]) -> TextTable:
    """Return the rows of the worst entries as a table."""
    return worst_rows(
        "How the model continues the entries' own sentences, not what it answers (--questions)", rows, _COLUMNS
    )


def worst_rows(title: str, rows: Sequence[Row], columns: Mapping[str, str]) -> TextTable:
    """Return the first rows as a table, whose title says how many more there are."""
    left = len(rows) - _MAX_ROWS
    return table_of(title + (f" ({left:,} more in --output FILE.csv)" if left > 0 else ""), rows[:_MAX_ROWS], columns)


def share_of_values(rows: Sequence[Row]) -> float | None:
    """Return the share of values that come back; None if there are none."""
    values = sum(row["values"] for row in rows)
    return sum(row["right"] for row in rows) / values if values else None


def glossary_finding(rows: Sequence[Row]) -> str:
    """Return in a sentence how many values are reproduced."""
    values, right, without, front = (sum(row[key] for row in rows) for key in ("values", "right", "without", "front"))
    said = (
        f"{right:,} of {values:,} values come back with packs, {without:,} without, {front:,} with the text in front."
    )
    empty = [row["entry"] for row in rows if not row["values"]]
    return said + (f" Entries that state no number and no capitalised word: {len(empty):,}." if empty else "")


def check_questions(model: Any, tokenizer: Any, name: str, questions: Sequence[Row]) -> list[Row]:
    """Ask a model questions about its glossary: with packs, without, and with the entries' texts.

    Args:
        model: A model with packs, which `from_pretrained` loaded.
        tokenizer: Its tokenizer.
        name: Its name, for messages.
        questions: Rows with `question` and `answer`, as `read_questions` returns them.

    Returns:
        Records of questions, wrong ones first, with `question`, `answer`, whether the model's answer is `right`, also `without` packs
        and with the text in `front`, what it `said` with packs, and which names the question has in another form (`read_as`).

    Raises:
        RequestError: If the model has no packs, or cannot be asked a question.
    """
    stack, service = packs_of(model)
    glossary: Glossary = model.glossary
    plain = tokenizer.chat_template is None
    rows: list[Row] = []
    with keep_readings(model, check_numbers=False):
        for row in show_progress(questions, desc="questions"):
            question, expected = row["question"], row["answer"]
            ids = glossary.spelling.ids(question)
            names = glossary.names_in_front(question, in_chat=not plain)
            texts = "".join(f"{glossary[number].text}\n\n" for number in glossary.named(ids))
            said = {}
            for key, in_front in (("packs", names), ("without", names), ("front", texts)):
                with without_memories(stack.layers, [] if key == "packs" else [service.name]):
                    inputs = question_inputs(model, tokenizer, in_front + question, name=name, plain=plain)
                    answer = tokenizer.decode(greedy_answer(model, inputs, _ANSWER_TOKENS), skip_special_tokens=True)
                said[key] = " ".join(answer.split())
            right, without, front = (has_answer(answer, expected) for answer in said.values())
            forms = ", ".join(f"{form}: {glossary[number].names[0]}" for form, number in glossary.forms(ids).items())
            judged = {"right": right, "without": without, "front": front, "said": said["packs"], "read_as": forms}
            rows.append({"question": question, "answer": expected, **judged})
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
            if not isinstance(row[column], str) or not has_answer(row[column], row[column]):
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
    return worst_rows("What the model answers to questions about the entries", told, _QUESTION_COLUMNS)


def questions_finding(rows: Sequence[Row]) -> str:
    """Return in a sentence how many questions are answered rightly."""
    right, without, front = (sum(row[key] for row in rows) for key in ("right", "without", "front"))
    return f"{right:,} of {len(rows):,} answers are right with packs, {without:,} without, {front:,} with the text in front."
