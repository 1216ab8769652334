"""The glossary of a model: entries of names and a text, in a readable file next to the weights, which may change at any time."""

import difflib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from midus_hf.anatomy.record import iter_recorded_options
from midus_hf.config.errors import RequestError
from midus_hf.config.wording import first_few
from midus_hf.files.checkpoint_files import GLOSSARY_FILE
from midus_hf.files.json_text import parse_json
from midus_hf.files.outputs import atomic_write
from midus_hf.memories.hosting.layer import CopiedLock
from midus_hf.memories.packs.names import (
    Found,
    NameTable,
    Spelling,
    compared,
    longest_of,
    names_in,
    spelled,
    whole_words,
)
from midus_hf.memories.packs.rows import Entry, entry_of, joined, names_of
from midus_hf.memories.packs.turns import learn_chat_marks

# Number of names and texts that are tokenised at once.
_CHECKED_AT_ONCE = 1000
# The most frequent words of a vocabulary, in whose order frequent tokens come first: almost every text has one.
_COMMON_WORDS = 1000
# Frequent words that are no name and an s, such as "leads": so many that most verbs are among them.
_WORDS_WITH_S = 5000
UNPROTECTED = "protected texts ({}) are not checked against the new names; the model no longer records that they contain no name."


def read_glossary(folder: Path) -> list[Entry]:
    """Return the entries in a checkpoint's folder.

    Raises:
        RequestError: If the file is absent, or a row is not an entry.
    """
    path = folder / GLOSSARY_FILE
    try:
        with path.open(encoding="utf-8-sig") as file:  # whose lines end only at line breaks, not at U+2028
            lines = [*file]
    except OSError as error:
        raise RequestError(
            f"there is no {GLOSSARY_FILE} in {folder} ({error}), without which no name would be known; expected one beside the "
            "weights. Copy the model's whole folder."
        ) from None
    entries = []
    for number, line in enumerate(lines, 1):
        where = f"line {number} of {path}"
        if not line.strip():
            continue
        try:
            row = parse_json(line, unique_keys=True)
        except ValueError as error:
            reason = f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise RequestError(
                f"{where} is no JSON ({reason}); expected a name and a text. Copy the file again."
            ) from None
        if not isinstance(row, dict):
            raise RequestError(f"{where} is {row!r}; expected a name and a text. Copy the file again.")
        entries.append(entry_of(row, where))
    return entries


def write_glossary(folder: str | os.PathLike, entries: Iterable[Entry]) -> None:
    """Write entries into a checkpoint's folder."""
    with atomic_write(Path(folder, GLOSSARY_FILE)) as partial, partial.open("w", encoding="utf-8") as file:
        for entry in entries:
            row = {"name": list(entry.names), "text": entry.text, **({"exact": True} if entry.exact else {})}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


class GlossaryChange(NamedTuple):
    """What rows changed in a glossary.

    Args:
        entries: The entries of the rows, as they are now.
        tokens: Number of tokens of all their texts.
        new_names: Names by which no entry was found before.
        remarks: Lines on rows that are not read as they are, such as texts that are longer than what is read.
    """

    entries: list[Entry]
    tokens: int
    new_names: list[str]
    remarks: list[str]


class Glossary:
    """Entries that a model knows, each with a unique number from 1. Changes take effect in the next pass.

    Passes may run while entries change: a running generation keeps the pack that it reads until another name is found.

    Args:
        tokenizer: The model's tokenizer.
        entries: The entries. Default: none.
        vocab_size: Number of tokens that the model has. Default: as many as the tokenizer.
        max_tokens: Tokens of an entry's text that are read at most. Default: not known.

    Raises:
        RequestError: If it is not known what the tokenizer's tokens spell.
    """

    def __init__(
        self,
        tokenizer: Any,
        entries: Iterable[Entry] = (),
        vocab_size: int | None = None,
        max_tokens: int | None = None,
    ):
        self.spelling, self.vocab_size, self.max_tokens = Spelling(tokenizer), vocab_size, max_tokens
        #: What `upscale` recorded in the model's config, where new names end what it says of protected texts; None without.
        self.recorded: Any = None
        #: Function of a loaded model that returns the entries that the last of some tokens reads, and others that they name.
        self.find_open: Callable[[list[int]], tuple[list[int], list[int]]] | None = None
        self._changing = CopiedLock()
        self._entries = dict(enumerate(entries, 1))
        self._next = len(self._entries) + 1
        self._frequent = _frequent_words(self.spelling, _WORDS_WITH_S)
        names = (name for number, entry in self._entries.items() for name in names_of(number, entry))
        self.table = NameTable(names, {word for word in self._frequent if word.endswith("s")})
        self._links: dict[int, tuple[NameTable, tuple[int, ...]]] = {}
        #: What the tokenizer's chat template writes around questions, and why it is None in spite of a template.
        self.chat_marks, self.chat_remark = learn_chat_marks(self.spelling)

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

    def items(self) -> list[tuple[int, Entry]]:
        """Return the entries with their numbers."""
        return [*self._entries.items()]

    def entry(self, number: int) -> Entry | None:
        """Return the entry with a number; None if it was removed."""
        return self._entries.get(number)

    def add(self, names: str | Sequence[str], text: str, *, exact: bool = False, common_names: bool = False) -> None:
        """Add an entry. A warning says if its text is longer than what is read, or if protected texts may have its names.

        Args:
            names: A name, or several.
            text: What the model should know about them.
            exact: Whether names match only with their case and separators, and without an s. Default: false; short names and those
                with a capital inside keep their case.
            common_names: Whether a name may be a frequent word, which almost every text has. Default: false.

        Raises:
            RequestError: If a name or the text is invalid, no tokens spell it, or a name is a frequent word or finds another entry.
        """
        row = {"name": names, "text": text, "exact": exact}
        self._say(self.change([("the new entry", row)], common_names=common_names))

    def remove(self, *names: str) -> list[Entry]:
        """Remove all entries that names find, in any form in which they are found in texts, and return them.

        Raises:
            RequestError: If a name finds no entry.
        """
        with self._changing.held:
            numbers = dict.fromkeys(number for name in names for number in self.numbers(name))
            removed = [self._entries[number] for number in numbers]
            self._exchange(numbers, [])
        return removed

    def replace(
        self, names: str | Sequence[str], text: str, *, exact: bool | None = None, common_names: bool = False
    ) -> None:
        """Replace the text of the entry with a name, and add the names that are new; warnings are those of `add`.

        Args:
            names: A name of the entry, or several, perhaps with new ones.
            text: What the model should know about them.
            exact: Whether names match only with their case. Default: as before.
            common_names: Whether a new name may be a frequent word. Default: false.

        Raises:
            RequestError: If no entry has a name, or two have, or for the reasons of `add`.
        """
        row = {"name": names, "text": text, "exact": exact}
        self._say(self.change([("the new text", row)], replaces=True, common_names=common_names))

    def change(
        self, rows: Iterable[tuple[str, Mapping[str, Any]]], *, replaces: bool = False, common_names: bool = False
    ) -> GlossaryChange:
        """Add the entries of rows, or replace those that they name; all rows or none.

        Args:
            rows: Origin of each row for messages, and the row, as for `entry_of`. Rows with the same names are joined.
            replaces: Whether each row has a name of an entry, which gets its text, its new names and, if given, its `exact`.
            common_names: Whether a new name may be a frequent word. Default: false.

        Raises:
            RequestError: As `add` and `replace` do.
        """
        with self._changing.held:
            old: dict[str, int] = {}
            read = []
            for where, row in rows:
                entry = entry_of(row, where)
                if replaces:
                    old[where] = self._only(entry, where)
                    entry = self._renewed(self._entries[old[where]], entry, row.get("exact") is not None)
                read.append((where, entry))
            entries, repeated = joined(read)
            numbers = {old[where] for where in entries} if replaces else set()
            new_names = [name for where, entry in entries.items() for name in self._new_names(where, entry, numbers)]
            lengths = self._lengths(entries)
            self._refuse_common(() if common_names else new_names)
            self._exchange(numbers, entries.values())
        cut = 0 if self.max_tokens is None else sum(length > self.max_tokens for length in lengths)
        remarks = [
            *([f"entries longer than {self.max_tokens} tokens, whose rest is not read: {cut:,}"] if cut else []),
            *([f"rows that repeat another one, and are left out: {repeated:,}"] if repeated else []),
        ]
        return GlossaryChange([*entries.values()], sum(lengths), new_names, remarks)

    def _only(self, entry: Entry, where: str) -> int:
        """Return the number of the entry that names find; refuse those of several, and names without one."""
        found = dict.fromkeys(number for name in entry.names for number in self.table.found(name))
        numbers = [*found] or self.numbers(entry.names[0])
        if len(numbers) > 1:
            firsts = ", ".join(repr(self._entries[number].names[0]) for number in numbers)
            raise RequestError(
                f"{where} has names of {len(numbers)} entries, {firsts}; expected names of one. Write a row for each, or delete "
                "entries that share a name."
            )
        return numbers[0]

    def _renewed(self, old: Entry, new: Entry, has_exact: bool) -> Entry:
        entry = old._replace(text=new.text, exact=new.exact if has_exact else old.exact)
        table = NameTable(names_of(0, entry))
        return entry._replace(names=(*old.names, *(name for name in new.names if not table.found(name))))

    def _new_names(self, where: str, entry: Entry, replaced: set[int]) -> Iterator[str]:
        """Yield the names of an entry that were none of a replaced one; refuse those of others."""
        for name, given in names_of(0, entry).items():
            others = [other for other in self.table.by_folded.get(name.folded, ()) if name.may_be(other)]
            if has := [other.entry for other in others if other.entry not in replaced]:
                raise RequestError(
                    f"{where} has the name {given!r}, which finds the entry {self._entries[has[0]].names[0]!r}; expected a new name. "
                    "Replace or delete that entry, or, where only case or separators differ, give both entries exact names."
                )
            if all(other.written not in (None, name.written) for other in others):
                yield given

    def _say(self, change: GlossaryChange) -> None:
        """Warn of what a change leaves out, and end what is recorded about protected texts if there are new names."""
        for line in change.remarks:
            warnings.warn(line, stacklevel=3)
        for options in iter_recorded_options(self.recorded, "packs") if change.new_names else ():
            if options.get("protect") is not None:
                warnings.warn(
                    f"{UNPROTECTED.format(options['protect'])} Check them with midus edit add.", stacklevel=3
                )
                options["protect"] = None

    def _exchange(self, numbers: Collection[int], new: Iterable[Entry]) -> None:
        """Replace entries by others with new numbers, while the lock is held."""
        entries = dict(self._entries)
        removed = [name for number in numbers for name in names_of(number, entries.pop(number))]
        added = dict(enumerate(new, self._next))
        for number in numbers:
            self._links.pop(number, None)
        self._next += len(added)
        self._entries = entries | added
        self.table = self.table.changed(
            [name for number, entry in added.items() for name in names_of(number, entry)], removed
        )

    def _lengths(self, entries: Mapping[str, Entry]) -> list[int]:
        """Refuse names and texts that tokens of the model do not spell; return how many tokens each text has."""
        lengths = []
        said = (
            (where, kind, text)
            for where, entry in entries.items()
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
            raise RequestError(
                f"{where} has the {kind} {shown!r}, of which the tokenizer makes token {largest}, and the model has "
                f"{self.vocab_size}; expected the model's own tokenizer. Copy it beside the weights, or resize the embedding."
            )
        is_spelled = self.spelling.spells(ids, text)
        special = self.spelling.special_in(text) if kind == "name" or not is_spelled else None
        if special is not None:
            raise RequestError(
                f"{where} has the {kind} {shown!r}, in which the tokenizer finds the special token {special!r}, which is no text "
                "to the model; expected text alone. Write it otherwise, or make the token an ordinary one."
            )
        if not is_spelled:
            raise RequestError(
                f"{where} has the {kind} {shown!r}, which the model's tokens do not spell; expected characters that its "
                "tokenizer knows. Write it otherwise, or remove the row."
            )

    def _refuse_common(self, names: Sequence[str]) -> None:
        frequent = {*self._frequent[:_COMMON_WORDS]}
        common = [name for name in names if len(name) < 2 or {name, name.lower()} & frequent]
        if common:
            raise RequestError(
                "names are single characters or frequent words, which almost every text has: "
                f"{first_few([*map(repr, common)])}; expected names that few texts have. Remove them, or allow them "
                "(common_names=true)."
            )

    def numbers(self, name: str) -> list[int]:
        """Return the numbers of the entries that a name finds, in any form in which it is found in texts.

        There is one, but in files that were written by hand.

        Raises:
            RequestError: If no entry has the name.
        """
        if not (found := self.table.found(name)):
            near = self.near(name)
            remedy = f"did you mean {', '.join(map(repr, near))}?" if near else "expected a name of the glossary."
            raise RequestError(f"no entry has the name {name!r}; {remedy}")
        return found

    def near(self, text: str) -> list[str]:
        """Return names that are similar to words of a text: at most three, which share most characters with one or two words."""
        words = compared(text)[0].split(" ")
        parts = {*words, *map(" ".join, itertools.pairwise(words))} - {""}
        near = (match for part in parts for match in difflib.get_close_matches(part, self.table.by_folded, 3, 0.8))
        return [self[self.table.by_folded[folded][0].entry].names[0] for folded in sorted({*near})][:3]

    def in_front(self, in_chat: bool) -> Sequence[int]:
        """Return the tokens before a text when it is read: in a chat, those before what a user says; else, those of a text."""
        return self.chat_marks.in_front if in_chat and self.chat_marks else self.spelling.in_front

    def texts_of(self, entries: Iterable[Entry], max_tokens: int) -> list[list[int]]:
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
        return list(dict.fromkeys(each.entry for each in self._found(ids)))

    def forms(self, ids: Iterable[int]) -> dict[str, int]:
        """Return names in the tokens of a text that are not spelled as an entry has them: with other separators, or an s.

        Returns:
            The number of the entry by the name as the text has it, in the order of the text.
        """
        found = {each.written: each.entry for each in self._found(ids)}
        return {
            written: number
            for written, number in found.items()
            if spelled(written)[0] not in {spelled(name)[0] for name in self[number].names}
        }

    def _found(self, ids: Iterable[int]) -> list[Found]:
        """Return the names in the tokens of a text, in order, without those within longer names."""
        found: list[Found] = []
        for token in names_in(self.table, map(self.spelling.piece, ids)):
            for each in token.closes:
                found.remove(each)
            found += token.opens
        return longest_of(found)

    def open_at_end(self, ids: Iterable[int]) -> list[Entry]:
        """Return the entries that the last token of a text reads, as the answer of `generate` does from its first token on.

        Args:
            ids: Ids as the model reads them, `[T]`: of a chat, what `apply_chat_template` returns with `add_generation_prompt=True`.

        Returns:
            The entries in the order in which they are read, the latest named last; none if the answer begins without the glossary.

        Raises:
            RequestError: If the glossary is not that of a model that `from_pretrained` loaded.
        """
        if self.find_open is None:
            raise RequestError(
                "this glossary is of no model, whose options say what is open; expected model.glossary after from_pretrained."
            )
        numbers, _ = self.find_open([int(token) for token in ids])
        return [self[number] for number in numbers]

    def names_in_front(self, text: str, in_chat: bool = True) -> str:
        """Return the first name of the entry that a text names, on a line, to put before the text as `midus ask` does.

        All words of a question then read the entry, and not only those after its name.

        Args:
            text: What a user asks.
            in_chat: Whether it is asked in a chat, where several entries are read best where the question names them, and none is
                put before it; in other text all are. Default: True.
        """
        numbers = self.named(self.spelling.ids(text))
        return "".join(f"{self[number].names[0]}\n" for number in numbers if not in_chat or len(numbers) == 1)

    def opened(self, ids: Iterable[int]) -> list[tuple[int, int]]:
        """Return where a pass over tokens opens an entry: the number of the token, from 0, and of the entry, in order.

        Before the first, a text keeps the logits of the model without packs, bit for bit. A name whose word goes on in a later token
        ("Ann" + "apolis") opens its entry up to there, so the same characters in other tokens may open none.

        Args:
            ids: Ids as the model reads them: of a text, what the tokenizer's call on it returns, with special tokens.
        """
        does = names_in(self.table, map(self.spelling.piece, ids))
        return [(at, found.entry) for at, token in enumerate(does) for found in token.opens]


def _frequent_words(spelling: Spelling, count: int) -> list[str]:
    """Return the most frequent words of a vocabulary in lower case, the most frequent first."""
    words: dict[str, None] = {}
    for word in whole_words(spelling):
        words[word.lower()] = None
        if len(words) == count:
            break
    return [*words]


def found_in(table: NameTable, text: str) -> list[Found]:
    """Return the names in a text, in order, without those within longer names."""
    found: list[Found] = []
    for token in names_in(table, [text.encode()]):
        found += token.opens
    return longest_of(found)
