"""Edits against what the base believes: answers of the base, exchanged for others, and their side effects.

The protocol is CounterFact's (arXiv 2202.05262), on capitals and chemical symbols, or on files of CounterFact and zsRE.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.facts.asked import Asked, InFront
from experiments.facts.entries import entries_of_elements, json_lines, made_up_entries
from experiments.facts.questions import begins_with
from material.factbook import factbook

OF_EACH = 20
TOKENS = 6


@dataclass(frozen=True)
class Relation:
    """A fact that names have, and the wordings in which it is asked, with `{name}`.

    Args:
        prompt: Beginning of the entry's text.
        other_wordings: Others for the same fact.
        other_facts: Beginnings of other facts of the name.
    """

    prompt: str
    other_wordings: tuple[str, ...]
    other_facts: tuple[str, ...]


CAPITAL = Relation(
    "The capital of {name} is",
    ("The capital city of {name} is called", "If you fly to the capital of {name}, you land in the city of"),
    ("{name} is a country on the continent of",),
)
SYMBOL = Relation(
    "The chemical symbol for {name} is",
    ("In formulas, the element {name} is written as", "The symbol of the element {name} in the periodic table is"),
    ("The atomic number of {name} is",),
)


@dataclass(frozen=True)
class Edit:
    """An answer that should be replaced.

    Args:
        name: Subject of the fact.
        prompt: The question; the entry's text is this and the new answer.
        new: The new answer.
        old: The old one.
        other_wordings: Prompts for the same answer.
        neighbours: Prompts about names without an entry, whose answers are to stay.
        other_facts: Prompts about the name, whose answers are to stay.
    """

    name: str
    prompt: str
    new: str
    old: str
    other_wordings: tuple[str, ...]
    neighbours: tuple[str, ...]
    other_facts: tuple[str, ...] = ()

    @property
    def entry(self) -> dict[str, Any]:
        """The entry that states the new answer."""
        return {"name": self.name, "text": f"{self.prompt} {self.new}."}

    def prompts(self) -> Iterator[tuple[str, str]]:
        """Yield the columns of a report and their prompts."""
        yield "followed", self.prompt
        if re.search(r"\b(is|was)$", self.prompt):
            yield "negation", f"{self.prompt} not"
        for column in ("other_wordings", "neighbours", "other_facts"):
            for prompt in getattr(self, column):
                yield column.replace("_", " "), prompt


def believed(base: Asked) -> dict[Relation, list[tuple[str, str]]]:
    """Return names and answers of which the base gives the answer itself, by relation, each answer once."""
    rows = json_lines(factbook().questions / "facts.jsonl")
    asked = {
        CAPITAL: [(row["country"], row["answers"]) for row in rows if row["field"] == "capital"],
        SYMBOL: [(row["name"], [row["symbol"]]) for row in entries_of_elements()],
    }
    found: dict[Relation, list[tuple[str, str]]] = {}
    for relation, facts in asked.items():
        # A capital with the name of its country, as Mexico City, is known without being known.
        facts = [(name, right) for name, right in facts if not any(name in each or each in name for each in right)]
        answers = base.continued([relation.prompt.format(name=name) for name, _ in facts], TOKENS)
        given = {
            right: name
            for (name, expected), answer in zip(facts, answers, strict=True)
            for right in expected
            if begins_with([right])(answer)
        }
        found[relation] = [(name, right) for right, name in given.items()]
    return found


def edits_of_beliefs(base: Asked, seed: int = 0) -> list[Edit]:
    """Return 20 edits of each relation at most, of which each gets the answer of another, and has a neighbour without an entry.

    Raises:
        ValueError: If the base gives fewer than three answers of a relation.
    """
    edits = []
    for relation, facts in believed(base).items():
        if len(facts) < 3:
            raise ValueError(
                f"the base answers {len(facts)} times rightly to {relation.prompt!r}; expected three at least, of which two are "
                "exchanged. Ask a base that knows more."
            )
        random.Random(seed).shuffle(facts)
        count = min(OF_EACH, len(facts) - 1)
        changed = facts[:count]
        kept = facts[count:]
        for number, (name, old) in enumerate(changed):
            edits.append(
                Edit(
                    name,
                    relation.prompt.format(name=name),
                    changed[(number + 1) % count][1],  # in the order of a shuffle, one circle of all
                    old,
                    tuple(each.format(name=name) for each in relation.other_wordings),
                    (relation.prompt.format(name=kept[number % len(kept)][0]),),
                    tuple(each.format(name=name) for each in relation.other_facts),
                )
            )
    return edits


def edits_of_counterfact(path: Path) -> list[Edit]:
    """Return the edits of a file of CounterFact, a list of records in JSON.

    Raises:
        ValueError: If a record lacks a field.
    """

    def edit(record: Mapping[str, Any]) -> Edit:
        asked = record["requested_rewrite"]
        new = asked["target_new"]["str"]
        old = asked["target_true"]["str"]
        subject = asked["subject"]
        others = tuple(record["paraphrase_prompts"]), tuple(record["neighborhood_prompts"])
        return Edit(subject, asked["prompt"].format(subject), new, old, *others)

    return _edits(path, edit)


def edits_of_zsre(path: Path) -> list[Edit]:
    """Return the edits of a file of zsRE as MEND wrote it, a list of records in JSON. The answers to neighbours are the base's.

    Raises:
        ValueError: If a record lacks a field.
    """

    def edit(record: Mapping[str, Any]) -> Edit:
        record["loc_ans"]  # which files of this form have
        others = (record["rephrase"],), (record["loc"],)
        return Edit(record["subject"], record["src"], record["alt"], record["answers"][0], *others)

    return _edits(path, edit)


def _edits(path: Path, edit: Callable[[Mapping[str, Any]], Edit]) -> list[Edit]:
    """Read a file of published records as edits; refuse a record of another form."""
    records = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(records, list) or not records:
        raise ValueError(
            f"{path} has {type(records).__name__}; expected a list of records. Unpack the file as it was published."
        )
    edits = []
    for number, record in enumerate(records, 1):
        try:
            edits.append(edit(record))
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"record {number} of {path} has not what was expected ({type(error).__name__}: {error}); expected the fields of the "
                "published form. Take the record out."
            ) from None
    return edits


def glossaries(edits: Sequence[Edit], size: int | None) -> Iterator[tuple[list[dict[str, Any]], Sequence[Edit]]]:
    """Yield glossaries of a size, and the edits that are asked of each: one edit of each, or all with made-up entries beside them.

    Raises:
        ValueError: If a glossary is too small for all edits, and not of one.
    """
    own = [each.entry for each in edits]
    if size == 1:
        yield from (([entry], [edit]) for entry, edit in zip(own, edits, strict=True))
    elif size is not None and size < len(edits):
        raise ValueError(f"--entries is {size}; expected 1, or at least the {len(edits)} that are asked for.")
    else:
        yield made_up_entries((size or len(own)) - len(own)) + own, edits


def report(
    model: Asked,
    base: Asked,
    edits: Sequence[Edit],
    size: int | None = None,
    words: Callable[[dict[str, Any]], str] | None = None,
) -> dict[str, list[int]]:
    """Return counts of a model, and of how many, by column.

    New answers: `followed`, `other wordings`, and `negation`, by greedy continuation; `likelier` and `likelier, other wordings`, more
    probable than the old. The first word of the base's answer: `neighbours` and `other facts`.

    Args:
        model: The model.
        base: The base.
        edits: What is asked.
        size: Entries of the glossary. Default: those of the edits.
        words: What stands in front of a prompt for each entry that it names. Default: nothing.
    """
    counts: dict[str, list[int]] = {}

    def count(column: str, yes: bool) -> None:
        both = counts.setdefault(column, [0, 0])
        both[0] += yes
        both[1] += 1

    base.continued([prompt for edit in edits for _, prompt in edit.prompts()], TOKENS)
    for entries, asked in glossaries(edits, size):
        model.give(entries)
        told = model.behind(None if words is None else InFront(entries, words))
        rows = [(edit, column, prompt) for edit in asked for column, prompt in edit.prompts()]
        prompts = [prompt for *_, prompt in rows]
        answers = told.continued([told.whole(prompt) for prompt in prompts], TOKENS)
        for (edit, column, _), answer, before in zip(rows, answers, base.continued(prompts, TOKENS), strict=True):
            is_kept = column in ("neighbours", "other facts")
            count(column, _first(answer) == _first(before) if is_kept else begins_with([edit.new])(answer))
        rows = [row for row in rows if row[1] in ("followed", "other wordings")]
        likelihoods = told.log_likelihoods(
            [(prompt, f" {answer}") for edit, _, prompt in rows for answer in (edit.new, edit.old)]
        )
        for (_, column, _), new, old in zip(rows, likelihoods[::2], likelihoods[1::2], strict=True):
            count("likelier" if column == "followed" else "likelier, other wordings", new > old)
    return counts


def _first(answer: str) -> str | None:
    found = re.search(r"\w+", answer)
    return found and found[0]
