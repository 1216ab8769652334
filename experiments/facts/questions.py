"""Questions about entries, in words that their texts do not have, and which continuations are right."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.facts import entries as known
from material.factbook import factbook
from midus_hf.evaluation.answers import has_answer, read_numbers

WORDINGS = {
    "name last": "The atomic number of {name} is",
    "place": "In the table of all elements, {name} stands at place",
    "element number": "{Name} is element number",
    "protons": "The nucleus of {name} has this many protons:",
}
PARAGRAPH = (
    "The river rises in the hills north of the town and flows south for forty miles before it reaches the sea. Its valley has been "
    "settled since the Bronze Age, and several mills were built along its banks in the seventeenth century. A narrow bridge of "
    "stone, repaired many times, carries the old road across it near the church. In summer the water is low and children wade from "
    "one side to the other. The mills closed long ago, and one of them is now a small museum of the valley and its people.\n\n"
)
CHATS = {
    "number in a chat": "What is the atomic number of {name}?",
    "protons in a chat": "How many protons does an atom of {name} have?",
}
PORTS = {
    "connect": "To connect to the {name}, use port number",
    "firewall": "The firewall must let packets of the {name} pass to port",
    "url": "A client reaches the {name} at http://localhost:",
}
TWO_HOPS = {
    "port, end": ("port", "Requests to the {name} end at port"),
    "port, call": ("port", "Who calls the {name} is answered in the end from port number"),
    "team, end": ("owner", "Requests to the {name} end at a product of the team of"),
    "team, call": ("owner", "Who calls the {name} is answered in the end by the team of"),
}


@dataclass(frozen=True)
class Question:
    """A prompt, and which continuations are right.

    Args:
        prompt: The prompt, or a user's message.
        is_right: Whether an answer is right; None if it should be the base's.
        is_chat: Whether the chat template is used.
        tokens: Most tokens of an answer.
        before: The messages before it in a chat: a user's, the answer to it, and so on.
    """

    prompt: str
    is_right: Callable[[str], bool] | None
    is_chat: bool = False
    tokens: int = 8
    before: tuple[str, ...] = ()


def first_number(expected: float, tolerance: float = 0.0) -> Callable[[str], bool]:
    """Return whether the first number of an answer is the expected one."""

    def is_right(answer: str) -> bool:
        found = next(read_numbers(answer), None)
        return found is not None and abs(float(found) - expected) <= tolerance

    return is_right


def begins_with(expected: Sequence[str]) -> Callable[[str], bool]:
    """Return whether an answer begins with one of the expected ones, in their case."""
    return lambda answer: any(has_answer(answer, each, "start", match_case=True) for each in expected)


def has(expected: Sequence[str]) -> Callable[[str], bool]:
    """Return whether an answer has one of the expected ones."""
    return lambda answer: any(has_answer(answer, each) for each in expected)


def of_elements(entries: Sequence[dict[str, Any]]) -> dict[str, list[Question]]:
    """Return what is asked of elements, by kind."""

    def asked(wording: str, right: Callable[[dict[str, Any]], Callable[[str], bool]]) -> list[Question]:
        named = [(each, {"name": each["name"], "Name": each["name"].capitalize()}) for each in entries]
        return [Question(wording.format(**names), right(each)) for each, names in named]

    kinds = {kind: asked(wording, lambda each: first_number(each["number"])) for kind, wording in WORDINGS.items()}
    kinds["behind a paragraph"] = asked(PARAGRAPH + WORDINGS["place"], lambda each: first_number(each["number"]))
    kinds["symbol"] = asked("The chemical symbol for {name} is", lambda each: begins_with([each["symbol"]]))
    for kind, wording in CHATS.items():
        named = asked(wording, lambda each: first_number(each["number"]))
        kinds[kind] = [replace(question, is_chat=True, tokens=24) for question in named]
    kinds["weight"] = [
        Question(f"The atomic weight of {each['name']} is", first_number(each["weight"], 0.005 * each["weight"]))
        for each in entries
        if each["weight"] is not None
    ]
    return kinds


def capitals() -> list[Question]:
    """Return questions for capitals, which name no element."""
    rows = [row for row in known.json_lines(factbook().questions / "facts.jsonl") if row["field"] == "capital"]
    return [Question(row["question"], begins_with(row["answers"])) for row in rows[: known.COUNTRIES]]


def of_countries(entries: Sequence[dict[str, Any]]) -> dict[str, list[Question]]:
    """Return the values that are asked for, by field."""
    kinds: dict[str, list[Question]] = {}
    for each in entries:
        for row in each["questions"]:
            kinds.setdefault(row["field"], []).append(Question(row["question"], begins_with(row["answers"])))
    return kinds


def of_products(entries: Sequence[dict[str, Any]]) -> dict[str, list[Question]]:
    """Return questions for ports, by wording."""
    return {
        kind: [Question(wording.format(name=each["name"]), first_number(each["port"])) for each in entries]
        for kind, wording in PORTS.items()
    }


def of_two_hops(entries: Sequence[dict[str, Any]]) -> dict[str, list[Question]]:
    """Return questions for the port and the team of the product behind the one that is named, by wording."""
    is_right = {"port": first_number, "owner": lambda team: begins_with([team])}
    return {
        kind: [
            Question(wording.format(name=each["name"]), is_right[value](each[value]))
            for each in entries
            if "behind" in each
        ]
        for kind, (value, wording) in TWO_HOPS.items()
    }


def of_uneven_texts(entries: Sequence[dict[str, Any]]) -> dict[str, list[Question]]:
    """Return questions as people ask them, alone and in a chat; an answer is right that has the number or name in 40 tokens."""
    alone = [
        Question(row["question"], has(row["answers"]), tokens=40) for each in entries for row in each["questions"]
    ]
    return {"alone": alone, "in a chat": [replace(question, is_chat=True) for question in alone]}


def of_conversations(entries: Sequence[dict[str, Any]]) -> dict[str, list[Question]]:
    """Return what is asked in chats, by kind.

    An answer is right that has the numbers and names of its row in 40 tokens, or a call that its pattern finds in 120; or, if the row
    has neither, that is the base's.
    """

    def is_right(row: dict[str, Any]) -> Callable[[str], bool] | None:
        if "pattern" in row:
            return lambda answer: re.search(row["pattern"], answer) is not None
        has_each = [has(row[key]) for key in ("answers", "also") if key in row]
        return (lambda answer: all(each(answer) for each in has_each)) if has_each else None

    kinds: dict[str, list[Question]] = {}
    for each in entries:
        for row in each["questions"]:
            tokens = 120 if "pattern" in row else 40
            before = tuple(row.get("before", ()))
            asked = Question(row["question"], is_right(row), is_chat=True, tokens=tokens, before=before)
            kinds.setdefault(row["kind"], []).append(asked)
    return kinds


# What is asked about: its entries, and the questions, by kind.
ABOUT: dict[str, Callable[[], tuple[list[dict[str, Any]], dict[str, list[Question]]]]] = {
    "elements": lambda: (entries := known.entries_of_elements(), of_elements(entries)),
    "countries": lambda: (entries := known.entries_of_countries(), of_countries(entries)),
    "products": lambda: (entries := known.entries_of_products(), of_products(entries)),
    "two-hop": lambda: (entries := known.entries_of_two_hops(), of_two_hops(entries)),
    "uneven": lambda: (entries := known.entries_in("uneven.jsonl"), of_uneven_texts(entries)),
    "uneven-2": lambda: (entries := known.entries_in("uneven_2.jsonl"), of_uneven_texts(entries)),
    "conversations": lambda: (entries := known.entries_in("conversations.jsonl"), of_conversations(entries)),
    "code": lambda: (entries := known.entries_in("code.jsonl"), of_conversations(entries)),
}
