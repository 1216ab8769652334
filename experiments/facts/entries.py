"""Entries of names and a text, about elements, countries, products, and a firm that does not exist."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from material.elements import elements
from material.factbook import FACTS, factbook

COUNTRIES = 60
PRODUCTS = (
    *("Kestrel", "Merlin", "Osprey", "Plover", "Curlew", "Dunlin", "Gannet", "Heron", "Jackdaw", "Lapwing"),
    *("Nuthatch", "Oriole", "Petrel", "Quail", "Redstart", "Siskin", "Teal", "Whimbrel", "Wryneck", "Yellowhammer"),
)
BEHIND = (
    *("Alder", "Aspen", "Beech", "Birch", "Cedar", "Cypress", "Elder", "Hazel", "Hickory", "Hornbeam"),
    *("Juniper", "Larch", "Linden", "Magnolia", "Maple", "Poplar", "Rowan", "Spruce", "Sycamore", "Willow"),
)
KINDS = ("gateway", "cache", "scheduler", "broker", "archive")
LANGUAGES = ("Go", "Rust", "Java", "Python")
TEAMS = ("storage", "billing", "search", "security", "delivery")
# Invented names, of three of these and a kind: 14,080.
SYLLABLES = (
    ("Bra", "Cor", "Dal", "Fen", "Gor", "Hul", "Jin", "Kel", "Lum", "Mor", "Nar", "Pel", "Qua", "Ros", "Sil", "Tan"),
    ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ra", "su"),
    ("bex", "dorn", "fal", "gan", "hult", "kor", "lin", "mond", "nox", "pern", "quist", "rad", "sten", "tov", "vik", "zor"),
)  # fmt: skip


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def entries_of_elements() -> list[dict[str, Any]]:
    """Return the 118 elements: `name`, `number`, `symbol`, `weight` and `text`, their four sentences."""
    folder = elements()
    texts: dict[str, list[str]] = {}
    for row in json_lines(folder / "facts.jsonl"):
        texts.setdefault(row["name"], []).append(row["text"])
    found = [{**row, "text": "\n".join(texts[row["name"]])} for row in json_lines(folder / "atomic_numbers.jsonl")]
    for row in found:
        weight = re.search(r"atomic weight is ([\d.]*\d)", row["text"])
        row["weight"] = float(weight[1]) if weight else None
    return found


def entries_of_countries() -> list[dict[str, Any]]:
    """Return 60 countries that have all five values: `name`, `text`, the lines that state them, and `questions` with `answers`."""
    book = factbook()
    found = []
    questions = json_lines(book.questions / "facts.jsonl")
    paths = {fact.field: " / ".join(fact.path) for fact in FACTS}
    for name, rows in itertools.groupby(questions, key=lambda row: row["country"]):
        asked = list(rows)
        file = book.train / f"{re.sub(r'[^a-z]+', '-', name.lower()).strip('-')}.txt"
        lines = file.read_text(encoding="utf-8").splitlines()
        stated = [line for row in asked for line in lines if line.startswith(f"{name} / {paths[row['field']]}:")]
        if len(asked) == len(FACTS) == len(stated):
            found.append({"name": name, "text": "\n".join(stated), "questions": asked})
    return found[:COUNTRIES]


def entries_of_products() -> list[dict[str, Any]]:
    """Return twenty products that do not exist: `name`, `port` and `text`, four sentences."""
    found = []
    for number, (word, kind) in enumerate(zip(PRODUCTS, itertools.cycle(KINDS)), start=1):
        name = f"{word} {kind}"
        port = 1024 + 2741 * number % 8951
        text = (
            f"The {name} listens on port {port}. It was released in {1990 + number} and is written in {LANGUAGES[number % 4]}. Its "
            f"owner is the team of {TEAMS[number % 5]}. Whoever starts the {name} must open port {port} first."
        )
        found.append({"name": name, "port": port, "text": text})
    return found


def entries_of_two_hops() -> list[dict[str, Any]]:
    """Return twenty products whose texts say which other product is behind them, and the twenty others, with `port` and `owner`.

    What is asked of the first, `behind`, `port` and `owner`, stands in the text of the other alone.
    """
    firsts, seconds = [], []
    for number, (word, tree) in enumerate(zip(PRODUCTS, BEHIND, strict=True), start=1):
        name = f"{word} {KINDS[number % 5]}"
        behind = f"{tree} {KINDS[(2 * number + 1) % 5]}"
        known = {"port": 1024 + 3571 * number % 8951, "owner": TEAMS[(3 * number + number // 5) % 5]}
        firsts.append(
            {"name": name, "behind": behind, **known, "text": f"The {name} forwards all requests to the {behind}."}
        )
        text = f"The {behind} listens on port {known['port']}. Its owner is the team of {known['owner']}."
        seconds.append({"name": behind, **known, "text": text})
    return firsts + seconds


def entries_in(file: str) -> list[dict[str, Any]]:
    """Return the entries in a file of this folder: `name`, or several, `text`, and `questions` with what is right."""
    return json_lines(Path(__file__).with_name(file))


def made_up_entries(count: int) -> list[dict[str, Any]]:
    """Return entries of products that no question names, to fill a glossary.

    Raises:
        ValueError: If there are not so many names.
    """
    parts = itertools.product(*SYLLABLES, KINDS)
    names = [f"{first}{second}{third} {kind}" for first, second, third, kind in itertools.islice(parts, count)]
    if len(names) < count:
        raise ValueError(
            f"{count} names are to be made up; expected at most {len(names)}. Ask for smaller glossaries."
        )
    return [
        {
            "name": name,
            "text": f"The {name} listens on port {1024 + 7919 * number % 64000}. Its owner is the team of {TEAMS[number % 5]}.",
        }
        for number, name in enumerate(names)
    ]


def names_of(entry: dict[str, Any]) -> Sequence[str]:
    """Return the names of an entry, which has one or several."""
    return [entry["name"]] if isinstance(entry["name"], str) else entry["name"]


def lines_of(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a training file."""
    for each in entries:
        yield json.dumps({"name": each["name"], "text": each["text"]}) + "\n"
