"""The glossary of a model: entries of names and a text, in a readable file next to the weights, which may change at any time."""

import difflib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from midus_hf.files.checkpoint_files import GLOSSARY_FILE
from midus_hf.files.outputs import atomic_write
from midus_hf.memories.hosting.layer import CopiedLock
from midus_hf.memories.packs.names import Found, Name, NameTable, Spelling, longest_of, name_of, names_in, spelled
from midus_hf.memories.packs.turns import chat_marks

# Number of names and texts that are tokenised at once.
_CHECKED_AT_ONCE = 1000


class Entry(NamedTuple):
    """An entry of a glossary.

    Args:
        names: The names, as they were given.
        text: What the model should know about them.
        exact: Whether names match only with their case. Default: false, only short names and those with a capital inside do.
    """

    names: tuple[str, ...]
    text: str
    exact: bool = False


def entry_of(row: Mapping[str, Any], where: str) -> Entry:
    """Return the entry of a row.

    Args:
        row: `name`, a name or a list of names, and `text`; perhaps `exact`.
        where: Origin of the row for messages, such as `"row 3 of glossary.jsonl"`.

    Raises:
        ValueError: If a name or the text is invalid, or a name seems to be several.
    """
    given, text, exact = row.get("name"), row.get("text"), row.get("exact")
    names = [given] if isinstance(given, str) else given
    if (
        not isinstance(names, list | tuple)
        or not names
        or not all(isinstance(name, str) and name.strip() for name in names)
    ):
        raise ValueError(
            f"{where} has the name {given!r}; expected a name, or a list of names. Write one, or remove the row."
        )
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"{where} has the text {text!r}; expected what is to be known of {names[0]!r}. Write it, or remove the row."
        )
    if exact not in (None, True, False):
        raise ValueError(f"{where} has exact = {exact!r}; expected true or false.")
    for name in names:
        if any(sign in name for sign in ";|") or (name.strip().startswith("[") and name.strip().endswith("]")):
            raise ValueError(
                f'{where} has the name {name!r}; did you mean several names? Expected a list, "name": ["first", "second"].'
            )
        if any(ord(sign) < 32 and not sign.isspace() for sign in name) or not spelled(name)[0]:
            raise ValueError(
                f"{where} has the name {name!r}, which no text can have; expected characters that are seen."
            )
    return Entry(tuple(dict.fromkeys(name.strip() for name in names)), text, bool(exact))


def joined(rows: Iterable[tuple[str, Entry]]) -> list[Entry]:
    """Return entries, joining those with the same names, whose texts are joined by a line break.

    Args:
        rows: Origin of each row for messages, and its entry.

    Raises:
        ValueError: If two entries share a name, as names are compared, and not all names.
    """
    entries: dict[tuple[str, ...], Entry] = {}
    owners: dict[Name, tuple[tuple[str, ...], str]] = {}
    for where, entry in rows:
        for name in entry.names:
            key = name_of(0, name, entry.exact)
            names, first = owners.setdefault(key, (entry.names, where))
            if names != entry.names:
                raise ValueError(
                    f"{where} has the name {name!r}, which {first} has beside other names; expected one list of names for an "
                    "entry. Give both rows the same names, which joins them."
                )
        before = entries.get(entry.names)
        entries[entry.names] = entry if before is None else before._replace(text=f"{before.text}\n{entry.text}")
    return list(entries.values())


def read_glossary(folder: Path) -> list[Entry]:
    """Return the entries in a checkpoint's folder.

    Raises:
        ValueError: If the file is absent, or a row is not an entry.
    """
    path = folder / GLOSSARY_FILE
    try:
        with path.open(encoding="utf-8") as file:  # whose lines end only at line breaks, not at U+2028
            lines = [*file]
    except OSError as error:
        raise ValueError(
            f"there is no {GLOSSARY_FILE} in {folder} ({error}), without which no name would be known; expected one beside the "
            "weights. Copy the model's whole folder."
        ) from None
    entries = []
    for number, line in enumerate(lines, 1):
        where = f"row {number} of {path}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{where} is no JSON ({error}); expected a name and a text. Copy the file again."
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f"{where} is {row!r}; expected a name and a text. Copy the file again.")
        entries.append(entry_of(row, where))
    return entries


def write_glossary(folder: str | os.PathLike, entries: Iterable[Entry]) -> None:
    """Write entries into a checkpoint's folder."""
    with atomic_write(Path(folder, GLOSSARY_FILE)) as partial, partial.open("w", encoding="utf-8") as file:
        for entry in entries:
            row = {"name": list(entry.names), "text": entry.text, **({"exact": True} if entry.exact else {})}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


class Glossary:
    """Entries that a model knows, each with a unique number from 1. Changes take effect in the next pass.

    Passes may run while entries change: a running generation keeps its open entries.

    Args:
        tokenizer: The model's tokenizer.
        entries: The entries. Default: none.
        vocab_size: Number of tokens that the model has. Default: as many as the tokenizer.

    Raises:
        ValueError: If it is not known what the tokenizer's tokens spell.
    """

    def __init__(self, tokenizer: Any, entries: Iterable[Entry] = (), vocab_size: int | None = None):
        self.spelling, self.vocab_size = Spelling(tokenizer), vocab_size
        self._changing = CopiedLock()
        self._entries = dict(enumerate(entries, 1))
        self._next = len(self._entries) + 1
        self.table = NameTable(name for number, entry in self._entries.items() for name in _names(number, entry))
        self._links: dict[int, tuple[NameTable, tuple[int, ...]]] = {}
        #: What the tokenizer's chat template writes around questions; None without one.
        self.chat_marks = chat_marks(self.spelling)

    @property
    def reach(self) -> int:
        """Number of tokens before a token by which it is known what that token opens, beside the state before them."""
        return max(self.table.reach, self.chat_marks.reach if self.chat_marks else 0)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter([*self._entries.values()])

    def __getitem__(self, number: int) -> Entry:
        return self._entries[number]

    def entry(self, number: int) -> Entry | None:
        """Return the entry with a number; None if it was removed."""
        return self._entries.get(number)

    def add(self, names: str | Sequence[str], text: str, *, exact: bool = False) -> None:
        """Add an entry.

        Args:
            names: A name, or several.
            text: What the model should know about them.
            exact: Whether names match only with their case. Default: false, only short names and those with a capital inside do.

        Raises:
            ValueError: If a name or the text is invalid, no tokens spell a name, or another entry has a name.
        """
        entry = entry_of({"name": names, "text": text, "exact": exact}, "the new entry")
        self.check([("the new entry", entry)])
        with self._changing.held:
            added = _names(self._next, entry)
            for name, given in zip(added, entry.names, strict=True):
                if any(other.written == name.written for other in self.table.by_folded.get(name.folded, ())):
                    raise ValueError(
                        f"the name {given!r} has an entry; expected a new name. Use replace, or remove it before."
                    )
            self._exchange(None, entry)

    def remove(self, name: str) -> Entry:
        """Remove the entry with a name, in any form in which it is found in texts, and return it.

        Raises:
            ValueError: If no entry has the name.
        """
        with self._changing.held:
            number = self.number(name)
            return self._exchange(number, None)

    def replace(self, name: str, text: str) -> None:
        """Replace the text of the entry with a name.

        Raises:
            ValueError: If no entry has the name, the text is empty, or no tokens spell it.
        """
        with self._changing.held:
            number = self.number(name)
            entry = self._entries[number]
            where = f"the entry {entry.names[0]!r}"
            new = entry_of({"name": entry.names, "text": text, "exact": entry.exact}, where)
            self.check([(where, new)])
            self._exchange(number, new)

    def _exchange(self, number: int | None, new: Entry | None) -> Any:
        """Replace an entry by another one with a new number, while the lock is held; return the old one."""
        entries, old = dict(self._entries), None
        if number is not None:
            old = entries.pop(number)
            self._links.pop(number, None)
        removed = [] if number is None or old is None else _names(number, old)
        added = [] if new is None else _names(self._next, new)
        if new is not None:
            entries[self._next] = new
            self._next += 1
        self._entries, self.table = entries, self.table.changed(added, removed)
        return old

    def check(self, entries: Iterable[tuple[str, Entry]]) -> list[int]:
        """Refuse names and texts that tokens of the model do not spell; return how many tokens each text has.

        Args:
            entries: Origin of each entry for messages, and the entry.

        Raises:
            ValueError: If there is one.
        """
        lengths = []
        said = (
            (where, kind, text)
            for where, entry in entries
            for kind, text in [*(("name", name) for name in entry.names), ("text", entry.text)]
        )
        while part := [*itertools.islice(said, _CHECKED_AT_ONCE)]:
            for (where, kind, text), ids in zip(
                part, self.spelling.ids_of([text for *_, text in part], False), strict=True
            ):
                self._check(where, kind, text, ids)
                lengths += [len(ids)] if kind == "text" else []
        return lengths

    def _check(self, where: str, kind: str, text: str, ids: Sequence[int]) -> None:
        shown, largest = text if len(text) <= 60 else f"{text[:60]}...", max(ids, default=0)
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise ValueError(
                f"{where} has the {kind} {shown!r}, of which the tokenizer makes token {largest}, and the model has "
                f"{self.vocab_size}; expected the model's own tokenizer. Copy it beside the weights, or resize the embedding."
            )
        if not self.spelling.spells(ids, text):
            raise ValueError(
                f"{where} has the {kind} {shown!r}, which the model's tokens do not spell; expected characters that its "
                "tokenizer knows. Write it otherwise, or remove the row."
            )

    def number(self, name: str) -> int:
        """Return the number of the entry with a name, in any form in which it is found in texts.

        Raises:
            ValueError: If no entry has the name.
        """
        folded, written = spelled(name)
        found = [each for each in self.table.by_folded.get(folded, ()) if each.written in (None, written)]
        if not found:
            near = self.near(name)
            remedy = f"did you mean {', '.join(map(repr, near))}?" if near else "expected a name of the glossary."
            raise ValueError(f"no entry has the name {name!r}; {remedy}")
        return found[0].entry

    def near(self, text: str) -> list[str]:
        """Return names that are similar to words of a text: at most three, which share most characters with one or two words."""
        words = spelled(text)[0].split(" ")
        parts = {*words, *map(" ".join, itertools.pairwise(words))} - {""}
        near = (match for part in parts for match in difflib.get_close_matches(part, self.table.by_folded, 3, 0.8))
        return [self[self.table.by_folded[folded][0].entry].names[0] for folded in sorted({*near})][:3]

    def in_front(self, in_chat: bool) -> Sequence[int]:
        """Return the tokens before a text when it is read: in a chat, those before what a user says first; else, those of a text."""
        return self.chat_marks.header if in_chat and self.chat_marks else self.spelling.in_front

    def texts_of(self, entries: Iterable[Entry], max_tokens: int, in_chat: bool) -> list[list[int]]:
        """Return the tokens of the texts of entries that are read, at most `max_tokens` each."""
        ids = self.spelling.ids_of([entry.text for entry in entries], special_tokens=False)
        return [each[:max_tokens] for each in ids]

    def linked(self, number: int) -> tuple[int, ...]:
        """Return the other entries that an entry's text names, in the order of the text."""
        table, entry = self.table, self.entry(number)
        kept = self._links.get(number)
        if kept is not None and kept[0] is table:
            return kept[1]
        named = () if entry is None else (each.entry for each in found_in(table, entry.text))
        links = tuple(each for each in dict.fromkeys(named) if each != number)
        self._links[number] = table, links
        return links

    def named(self, ids: Iterable[int]) -> list[int]:
        """Return the entries whose names occur in the tokens of a text, in order, without those within longer names."""
        found: list[Found] = []
        for token in names_in(self.table, map(self.spelling.piece, ids)):
            for entry in token.closes:
                found.pop(max(at for at, each in enumerate(found) if each.entry == entry))
            found += token.opens
        return list(dict.fromkeys(each.entry for each in longest_of(found)))


def _names(number: int, entry: Entry) -> list[Name]:
    return [name_of(number, name, entry.exact) for name in entry.names]


def found_in(table: NameTable, text: str) -> list[Found]:
    """Return the names in a text, in order, without those within longer names."""
    found: list[Found] = []
    for token in names_in(table, [text.encode()]):
        found += token.opens
    return longest_of(found)
