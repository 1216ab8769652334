"""Check of a glossary: whether a model with packs reproduces the texts of its entries, and which names are found."""

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import regex
import torch

from midus_hf.evaluation.answers import SPACED
from midus_hf.look.page import Row, TextTable, table_of
from midus_hf.memories.hosting.layer import without_memories
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.memories.packs.glossary import Glossary
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
_MOST_ROWS = 30
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
    """A value in an entry's text.

    Args:
        prompt: The sentence up to the value, without the space before it.
        text: The value, with that space.
    """

    prompt: str
    text: str


@dataclass
class EntryCheck:
    """Result of the check of one entry.

    Args:
        name: Its first name.
        values: Its values.
        right: Whether each came back, by what was read: `packs`, `without` and `front`.
        not_found: Spellings of a name that open nothing.
        also_with: What other forms have that open it: other separators, an s, Korean particles.
        within: Names of other entries that contain one of its names.
    """

    name: str
    values: list[Value]
    right: dict[str, list[bool]] = field(default_factory=dict)
    not_found: list[str] = field(default_factory=list)
    also_with: list[str] = field(default_factory=list)
    within: list[str] = field(default_factory=list)

    def row(self) -> Row:
        """Return the row of the table."""
        lost = [value.text.strip() for value, back in zip(self.values, self.right["packs"], strict=True) if not back]
        return {
            "entry": self.name,
            "values": len(self.values),
            **{name: sum(self.right[key]) for name, key in (("right", "packs"), ("without", "without"), ("front", "front"))},
            "lost": ", ".join(lost),
            **{name: ", ".join(getattr(self, name)) for name in ("not_found", "also_with", "within")},
        }  # fmt: skip


def check_glossary(model: Any, limit: int | None = None, batch_size: int = 4) -> list[EntryCheck]:
    """Check whether a model reproduces the values of its glossary's entries, and whether their names are found.

    Args:
        model: A model with packs, which `from_pretrained` loaded.
        limit: Number of entries, the first ones. Default: all.
        batch_size: Values per forward pass.

    Returns:
        One per entry, those with the most missing values first.

    Raises:
        RequestError: If the model has no packs.
    """
    stack, service = packs_of(model)
    glossary: Glossary = model.glossary
    numbered = glossary.items()[:limit]
    entries = [entry for _, entry in numbered]
    holding = _holding(glossary)
    checks = [
        EntryCheck(
            entry.names[0],
            values_of(entry.text, entry.names),
            not_found=[
                f"{written} ({way})" for written, way, is_found in _try(glossary, number, _WRITINGS) if not is_found
            ],
            also_with=[*dict.fromkeys(way for _, way, is_found in _try(glossary, number, _FORMS) if is_found)],
            within=holding.get(number, []),
        )
        for number, entry in numbered
    ]
    named = [f"{entry.names[0]}\n" for entry in entries]
    texts = [f"{entry.text}\n\n" for entry in entries]
    for key, fronts in (("packs", named), ("without", named), ("front", texts)):
        skipped = [] if key == "packs" else [service.name]
        asked = [
            (front + value.prompt, value.text)
            for check, front in zip(checks, fronts, strict=True)
            for value in check.values
        ]
        with without_memories(stack.layers, skipped):
            bar = show_progress(total=len(asked), desc=key, unit=" values")
            answers = iter([*_likeliest(model, glossary.spelling.tokenizer, asked, batch_size, bar)])
        for check in checks:
            check.right[key] = [next(answers) for _ in check.values]
    return sorted(
        checks, key=lambda check: (sum(check.right["packs"]) / max(1, len(check.values)), -len(check.values))
    )


def packs_of(model: Any) -> tuple[Any, Any]:
    """Return the decoder of a model and its packs."""
    stack = decoder_of(model)
    service = getattr(stack, "services", {}).get("packs")
    if service is None:
        raise lacking(model, "is a glossary (packs)")
    return stack, service


def values_of(text: str, names: Sequence[str]) -> list[Value]:
    """Return the numbers and names in the sentences of a text, except the names of the entry."""
    name_words = {word for name in names for word in re.findall(r"\w+", name.lower())}
    values = []
    for sentence in filter(None, map(str.strip, _SENTENCE_END.split(text))):
        for found in _VALUE.finditer(sentence):
            before, word = sentence[: found.start()], found[0]
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
            (does,) = names_in(glossary.table, [name.encode()])
            for other in {found.entry for found in does.opens} - {number}:
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
            ids[row, : len(each)], mask[row, : len(each)] = torch.tensor(each), 1
        inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
        likeliest = model(**inputs, use_cache=False).logits.argmax(-1).cpu()
        for row, (prompt, _) in enumerate(part):
            within = [at for at, (_, end) in enumerate(whole["offset_mapping"][row]) if end > len(prompt)]
            yield all(likeliest[row, at - 1] == ids[row, at] for at in within)
        bar.update(len(part))
    bar.close()


def glossary_rows(checks: Iterable[EntryCheck]) -> list[Row]:
    """Return a row per entry."""
    return [check.row() for check in checks]


def glossary_table(rows: Sequence[Row]) -> TextTable:
    """Return the rows of the worst entries as a table."""
    return worst_rows(
        "How the model continues the entries' own sentences, not what it answers (--questions)", rows, _COLUMNS
    )


def worst_rows(title: str, rows: Sequence[Row], columns: Mapping[str, str]) -> TextTable:
    """Return the first rows as a table, whose title says how many more there are."""
    left = len(rows) - _MOST_ROWS
    return table_of(title + (f" ({left:,} more in --output FILE.csv)" if left > 0 else ""), rows[:_MOST_ROWS], columns)


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
