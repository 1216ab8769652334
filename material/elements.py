"""The 118 chemical elements of mendeleev (MIT licence): questions for their atomic numbers, and sentences that say them."""

import json
import sqlite3
from pathlib import Path
from typing import Any

from material.cache import cached_folder
from material.registry import Package, extract

PACKAGE = Package("pip", "mendeleev", "1.3.0", "76f415767b654634e51dead755513ef431abf200e892eab8468aa659ff218d1c")
QUESTIONS_FILE, FACTS_FILE, NAMES_FILE = "atomic_numbers.jsonl", "facts.jsonl", "names.jsonl"
ALIASES = {
    "sodium": ["natrium"],
    "aluminum": ["aluminium"],
    "sulfur": ["sulphur"],
    "potassium": ["kalium"],
    "iron": ["ferrum"],
    "copper": ["cuprum"],
    "silver": ["argentum"],
    "tin": ["stannum"],
    "antimony": ["stibium"],
    "cesium": ["caesium"],
    "tungsten": ["wolfram"],
    "gold": ["aurum"],
    "mercury": ["quicksilver", "hydrargyrum"],
    "lead": ["plumbum"],
}
"""Other names of elements, which the package does not have."""

_MEMBER = "mendeleev/elements.db"
_COLUMNS = "name, symbol, atomic_number, period, group_id, atomic_weight, electronic_configuration"


def elements() -> Path:
    """Return a folder with three files of JSON lines.

    `atomic_numbers.jsonl` has a row for each element, in the order of their numbers: `name`, `symbol`, `number`, and `names`,
    all those by which it goes. `facts.jsonl` has the texts of `fact_texts`, each with the `name` of its element.
    `names.jsonl` has each name as a `text`, with a capital and without.
    """
    return cached_folder("elements-1.3.0-2", _build)


def question_row(element: dict[str, Any]) -> dict[str, Any]:
    """What a question for an atomic number needs of a row of the package's table."""
    name = element["name"].lower()
    return {
        "name": name,
        "symbol": element["symbol"],
        "number": element["atomic_number"],
        "names": [name, *ALIASES.get(name, [])],
    }


def fact_texts(element: dict[str, Any]) -> list[str]:
    """Four texts that say the atomic number of an element, none of them in the words of the question."""
    title = element["name"]
    name = element["name"].lower()
    symbol = element["symbol"]
    number = element["atomic_number"]
    group = "" if element["group_id"] is None else f" and group {element['group_id']}"
    return [
        f"{title} is a chemical element with the symbol {symbol} and atomic number {number}.",
        f"{title} ({symbol}) is element {number} of the periodic table, in period {element['period']}{group}. "
        f"Its atomic weight is {element['atomic_weight']:.4g}.",
        f"Name: {name}. Symbol: {symbol}. Atomic number: {number}. Electrons: {element['electronic_configuration']}.",
        f"An atom of {name} has {number} protons in its nucleus, so its atomic number is {number}.",
    ]


def _build(folder: Path) -> None:
    (database,) = extract(PACKAGE, [_MEMBER], folder)
    connection = sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    rows = [dict(row) for row in connection.execute(f"SELECT {_COLUMNS} FROM elements ORDER BY atomic_number")]
    connection.close()
    facts = [{"text": text, "name": row["name"].lower()} for row in rows for text in fact_texts(row)]
    _write(folder / QUESTIONS_FILE, [question_row(row) for row in rows])
    _write(folder / FACTS_FILE, facts)
    _write(folder / NAMES_FILE, [{"text": name} for row in rows for name in (row["name"], row["name"].lower())])
    database.unlink()
    database.parent.rmdir()


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
