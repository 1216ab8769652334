"""A model's glossary: entries of names and a text, in a readable file next to the weights."""

import difflib
import itertools
import json
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from midus_hf.config.errors import RequestError, first_few
from midus_hf.files.checkpoint_files import GLOSSARY_FILE, parse_json
from midus_hf.files.outputs import atomic_write
from midus_hf.memories.hosting.layer import CopiedLock
from midus_hf.memories.options import package_only
from midus_hf.memories.packs.chat_marks import learn_chat_marks
from midus_hf.memories.packs.names import (
    Name,
    NameIndex,
    TokenSpelling,
    compared,
    find_names,
    is_text,
    name_of,
    names_in,
    spelled,
    whole_words,
)
from midus_hf.memories.packs.opening import OpeningTracker, readings_of

_CHECKED_AT_ONCE = 1000
# The most frequent words of a vocabulary, in whose order frequent tokens come first: almost every text has one.
_COMMON_WORDS = 1000
# Frequent words that are no name and an s, such as "leads": so many that most verbs are among them.
_WORDS_WITH_S = 5000
UNPROTECTED = "protected texts ({}) are not checked against the new names; the model no longer records that they contain no name."


class Entry(NamedTuple):
    """An entry of a glossary: its names, as they were given, and what the model should know about them.

    `exact` names match only with their case and separators, and without an s. Default: false; short names and those with a capital
    inside keep their case.
    """

    names: tuple[str, ...]
    text: str
    exact: bool = False


def entry_of(row: Mapping[str, Any], where: str) -> Entry:
    """Return the entry of a row with `name`, a name or a list of names, `text`, and perhaps `exact`.

    A `RequestError` names `where` for an invalid name or text, or a name that seems to be several.
    """
    given, text, exact = row.get("name"), row.get("text"), row.get("exact")
    names = [given] if isinstance(given, str) else given
    are_names = isinstance(names, list | tuple) and all(isinstance(name, str) and name.strip() for name in names)
    if not are_names or not names:
        raise RequestError(
            f"{where} has the name {given!r}; expected a name, or a list of names. Write one, or remove the row."
        )
    if not isinstance(text, str) or not text.strip():
        raise RequestError(
            f"{where} has the text {text!r}; expected what is to be known of {names[0]!r}. Write it, or remove the row."
        )
    if exact not in (None, True, False):
        raise RequestError(
            f"{where} has exact = {exact!r}; expected true or false, in JSON, since columns of CSV are text."
        )
    for name in names:
        if any(sign in name for sign in ";|") or (name.strip().startswith("[") and name.strip().endswith("]")):
            raise RequestError(
                f'{where} has the name {name!r}; did you mean several names? Expected a list, "name": ["first", "second"].'
            )
        if any(ord(sign) < 32 and not sign.isspace() for sign in name) or not spelled(name)[0] or not is_text(name):
            raise RequestError(
                f"{where} has the name {name!r}, which no text can have; expected characters that are seen."
            )
    if not is_text(text):
        raise RequestError(
            f"{where} has the text {text!r:.60}, with an unpaired surrogate; expected whole characters. Write it again as UTF-8."
        )
    return Entry(tuple(dict.fromkeys(name.strip() for name in names)), text, bool(exact))


def names_of(number: int, entry: Entry) -> dict[Name, str]:
    """Return the names of an entry as they are compared, and as they were given."""
    return {name_of(number, name, entry.exact): name for name in entry.names}


def read_glossary(folder: Path) -> list[Entry]:
    """Return the entries in a checkpoint's folder; a `RequestError` without a file or for an invalid row."""
    path = folder / GLOSSARY_FILE
    try:
        with path.open(encoding="utf-8-sig") as file:  # whose lines end only at line breaks, not at U+2028
            lines = [*file]
    except OSError as error:
        raise RequestError(
            f"there is no {GLOSSARY_FILE} in {folder} ({error}), so no name would be known; expected one next to the "
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
    """Entries that a model reads, each with a unique number from 1.

    A change, also one while passes run, holds from the next pass on; a running generation keeps the pack that it reads until another
    name is found.

    Args:
        tokenizer: The model's tokenizer; it has to show what its tokens spell.
        entries: The entries. Default: none.
        vocab_size: Number of tokens that the model has. Default: as many as the tokenizer.
        options: `PacksOptions` of the model's memory. Default: not known.
    """

    def __init__(
        self, tokenizer: Any, entries: Iterable[Entry] = (), vocab_size: int | None = None, options: Any = None
    ):
        self.spelling, self.vocab_size, self.options = TokenSpelling(tokenizer), vocab_size, options
        self._entries = dict(enumerate(entries, 1))
        frequent: dict[str, None] = {}
        for word in whole_words(self.spelling):
            frequent[word.lower()] = None
            if len(frequent) == _WORDS_WITH_S:
                break
        self._frequent = [*frequent]
        self._not_forms = {word for word in frequent if word.endswith("s")}
        self._names = {number: [*names_of(number, entry)] for number, entry in self._entries.items()}
        self.index = NameIndex(itertools.chain(*self._names.values()), self._not_forms)
        self._links: dict[int, tuple[NameIndex, tuple[int, ...]]] = {}
        #: What the tokenizer's chat template writes around questions, and why it is None in spite of a template.
        self.chat_marks, self.chat_remark = learn_chat_marks(self.spelling)
        #: Options of packs that `upscale` recorded in the model's config, where new names end what is said of protected texts.
        self.recorded: Sequence[dict[str, Any]] = ()
        self._changing = CopiedLock()
        self._next = len(self._entries) + 1

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"Glossary has no {name!r}; a checkpoint's own code only reads it: install midus-hf, or use midus edit."
        )

    @property
    def lookback_tokens(self) -> int:
        """Earlier tokens that, with the state, decide what a token opens."""
        return max(self.index.lookback_tokens, self.chat_marks.max_tokens if self.chat_marks else 0)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter([*self._entries.values()])

    def __getitem__(self, number: int) -> Entry:
        return self._entries[number]

    def token_prefix(self, in_chat: bool) -> Sequence[int]:
        """Return the tokens before a text when it is read: in a chat, those before what a user says."""
        return self.chat_marks.in_front if in_chat and self.chat_marks else self.spelling.in_front

    def tokens_of(self, numbers: Iterable[int], max_tokens: int) -> dict[int, list[int]]:
        """Return the tokens that are read of entries, at most `max_tokens` each, without removed entries."""
        texts = {number: entry.text for number in numbers if (entry := self._entries.get(number)) is not None}
        ids = self.spelling.ids_of([*texts.values()], special_tokens=False) if texts else []
        return {number: each[:max_tokens] for number, each in zip(texts, ids, strict=True)}

    def linked(self, number: int) -> tuple[int, ...]:
        """Return the other entries that an entry's text names, in the order of the text."""
        index, entry = self.index, self._entries.get(number)
        kept = self._links.get(number)
        if kept is not None and kept[0] is index:
            return kept[1]
        named = () if entry is None else (each.entry for each in find_names(index, entry.text))
        links = tuple(each for each in dict.fromkeys(named) if each != number)
        self._links[number] = index, links
        return links

    @package_only
    def open_at_end(self, ids: Iterable[int]) -> list[Entry]:
        """Return the entries that a text's last token, and an answer to it, reads, the latest named last.

        `ids` are as the model reads them, `[T]`: of a chat, what `apply_chat_template` returns with `add_generation_prompt=True`.

        Raises:
            RequestError: If the glossary is not that of a model that `from_pretrained` loaded.
        """
        if self.options is None:
            raise RequestError(
                "this glossary is of no model, whose options say what is open; expected model.glossary after from_pretrained."
            )
        tokens, row = [int(token) for token in ids], OpeningTracker(self, self.options)
        readings_of(row, tokens, range(len(tokens)), None)
        pack = row.pack()
        return [] if pack is None else [self[number] for number in pack[0].entries]

    @package_only
    def add(self, names: str | Sequence[str], text: str, *, exact: bool = False, common_names: bool = False) -> None:
        """Add an entry. A warning says if its text is too long, or if protected texts may have its names.

        Args:
            names: A name, or several.
            text: What the model should know about them.
            exact: As of an `Entry`. Default: false.
            common_names: Whether a name may be a frequent word, which almost every text has. Default: false.

        Raises:
            RequestError: If a name or the text is invalid, no tokens spell it, or a name is a frequent word or finds another entry.
        """
        row = {"name": names, "text": text, "exact": exact}
        self._warn_about_change(self.change([("the new entry", row)], common_names=common_names))

    @package_only
    def replace(
        self, names: str | Sequence[str], text: str, *, exact: bool | None = None, common_names: bool = False
    ) -> None:
        """Replace the text of the entry with a name, and add new names, as `add` does; `exact` None leaves it.

        Raises:
            RequestError: If no entry has a name, or two have, or for the reasons of `add`.
        """
        row = {"name": names, "text": text, "exact": exact}
        self._warn_about_change(self.change([("the new text", row)], replaces=True, common_names=common_names))

    @package_only
    def remove(self, *names: str) -> list[Entry]:
        """Remove and return all entries that names find, in any form; a `RequestError` if one finds none."""
        with self._changing.held:
            numbers = dict.fromkeys(number for name in names for number in self._numbers(name))
            removed = [self._entries[number] for number in numbers]
            self._exchange(numbers, [])
        return removed

    @package_only
    def change(
        self, rows: Iterable[tuple[str, Mapping[str, Any]]], *, replaces: bool = False, common_names: bool = False
    ) -> GlossaryChange:
        """Add the entries of rows, or replace those that they name, all or none; raises as `add`, `replace`.

        Args:
            rows: Origin of each row for messages, and the row, as for `entry_of`. Rows with the same names are joined.
            replaces: Whether each row has a name of an entry, which gets its text, its new names and, if given, its `exact`.
            common_names: Whether a new name may be a frequent word. Default: false.
        """
        with self._changing.held:
            old: dict[str, int] = {}
            read = []
            for where, row in rows:
                entry = entry_of(row, where)
                if replaces:
                    old[where] = self._find_single_entry(entry, where)
                    entry = _renewed(self._entries[old[where]], entry, row.get("exact") is not None)
                read.append((where, entry))
            entries, repeated = joined(read)
            numbers = {old[where] for where in entries} if replaces else set()
            new_names = [name for where, entry in entries.items() for name in self._new_names(where, entry, numbers)]
            lengths = self._check_spelling(entries)
            frequent = {*self._frequent[:_COMMON_WORDS]}
            common = [repr(name) for name in new_names if len(name) < 2 or {name, name.lower()} & frequent]
            if common and not common_names:
                raise RequestError(
                    f"names are single characters or frequent words, which almost every text has: {first_few(common)}; expected "
                    "names that few texts have. Remove them, or allow them (common_names=true)."
                )
            self._exchange(numbers, entries.values())
        most = None if self.options is None else self.options.max_tokens
        cut = 0 if most is None else sum(length > most for length in lengths)
        remarks = [
            *([f"entries longer than {most} tokens, whose rest is not read: {cut:,}"] if cut else []),
            *([f"rows that repeat another one, and are left out: {repeated:,}"] if repeated else []),
        ]
        return GlossaryChange([*entries.values()], sum(lengths), new_names, remarks)

    @package_only
    def _find_single_entry(self, entry: Entry, where: str) -> int:
        """Return the number of the entry that names find; refuse several, and names without one."""
        found = dict.fromkeys(number for name in entry.names for number in self.index.entries_of(name))
        numbers = [*found] or self._numbers(entry.names[0])
        if len(numbers) > 1:
            firsts = ", ".join(repr(self._entries[number].names[0]) for number in numbers)
            raise RequestError(
                f"{where} has names of {len(numbers)} entries, {firsts}; expected names of one. Write a row for each, or delete "
                "entries that share a name."
            )
        return numbers[0]

    @package_only
    def _new_names(self, where: str, entry: Entry, replaced: set[int]) -> Iterator[str]:
        """Yield the names of an entry that were none of a replaced one; refuse those of others."""
        for name, given in names_of(0, entry).items():
            others = [other for other in self.index.by_folded.get(name.folded, ()) if may_be_same(name, other)]
            if has := [other.entry for other in others if other.entry not in replaced]:
                raise RequestError(
                    f"{where} has the name {given!r}, which finds the entry {self._entries[has[0]].names[0]!r}; expected a new name. "
                    "Replace or delete that entry, or, where only case or separators differ, give both entries exact names."
                )
            if is_new_name(self.index, name):
                yield given

    @package_only
    def _warn_about_change(self, change: GlossaryChange) -> None:
        """Warn of what a change leaves out; new names end what is recorded about protected texts."""
        for line in change.remarks:
            warnings.warn(line, stacklevel=3)
        if not change.new_names:
            return
        for options in self.recorded:
            if options.get("protect") is not None:
                warnings.warn(
                    f"{UNPROTECTED.format(options['protect'])} Check them with midus edit add.", stacklevel=3
                )
                options["protect"] = None

    @package_only
    def _exchange(self, numbers: Collection[int], new: Iterable[Entry]) -> None:
        """Replace entries by others with new numbers, while the lock is held."""
        added = dict(enumerate(new, self._next))
        self._next += len(added)
        for number in numbers:
            self._links.pop(number, None)
        self._entries = {number: each for number, each in self._entries.items() if number not in numbers} | added
        kept = {number: names for number, names in self._names.items() if number not in numbers}
        removed = [name for number in numbers for name in self._names[number]]
        new_names = {number: [*names_of(number, entry)] for number, entry in added.items()}
        self._names = kept | new_names
        self.index = self.index.exchanged(removed, itertools.chain(*new_names.values()))

    @package_only
    def _check_spelling(self, entries: Mapping[str, Entry]) -> list[int]:
        """Refuse names and texts that tokens do not spell; return how many tokens each text has."""
        lengths, added = [], self.spelling.tokenizer.added_tokens_decoder.values()
        special_texts = {token.content.casefold(): token.content for token in added if token.special}
        parts = (
            (where, kind, text)
            for where, entry in entries.items()
            for kind, text in [*(("name", name) for name in entry.names), ("text", entry.text)]
        )
        while some := [*itertools.islice(parts, _CHECKED_AT_ONCE)]:
            rows = self.spelling.ids_of([text for *_, text in some], special_tokens=False)
            for (where, kind, text), ids in zip(some, rows, strict=True):
                start = text if len(text) <= 60 else f"{text[:60]}..."
                shown = f"{where} has the {kind} {start!r}"
                if self.vocab_size is not None and max(ids, default=0) >= self.vocab_size:
                    raise RequestError(
                        f"{shown}, which has token {max(ids)}, and the model has only {self.vocab_size}; expected the "
                        "model's own tokenizer. Copy it next to the weights, or resize the embedding."
                    )
                is_spelled = spells(self.spelling, ids, text)
                within = f" {' '.join(text.split())} ".casefold()
                special = next((token for folded, token in special_texts.items() if folded in within), None)
                if special is not None and (kind == "name" or not is_spelled):
                    raise RequestError(
                        f"{shown}, in which the tokenizer finds the special token {special!r}, which is not text to the model; "
                        "expected plain text. Write it otherwise, or make the token an ordinary one."
                    )
                if not is_spelled:
                    raise RequestError(
                        f"{shown}, which the model's tokens do not spell; expected characters that its tokenizer knows. Write it "
                        "otherwise, or remove the row."
                    )
                lengths += [len(ids)] if kind == "text" else []
        return lengths

    @package_only
    def _numbers(self, name: str) -> list[int]:
        """Return the entries that a name finds; several only in files that were written by hand."""
        if not (found := self.index.entries_of(name)):
            similar = self.suggest_names(name)
            remedy = (
                f"did you mean {', '.join(map(repr, similar))}?" if similar else "expected a name of the glossary."
            )
            raise RequestError(f"no entry has the name {name!r}; {remedy}")
        return found

    @package_only
    def suggest_names(self, text: str) -> list[str]:
        """Return up to three names that resemble words of a text."""
        words = compared(text)[0].split(" ")
        parts = {*words, *map(" ".join, itertools.pairwise(words))} - {""}
        near = (match for part in parts for match in difflib.get_close_matches(part, self.index.by_folded, 3, 0.8))
        return [self[self.index.by_folded[folded][0].entry].names[0] for folded in sorted({*near})][:3]

    @package_only
    def items(self) -> list[tuple[int, Entry]]:
        """Return the entries with their numbers."""
        return [*self._entries.items()]

    @package_only
    def named(self, ids: Iterable[int]) -> list[int]:
        """Return the entries named in tokens, in order, without names within longer ones."""
        return [*dict.fromkeys(each.entry for each in find_names(self.index, map(self.spelling.piece, ids)))]

    @package_only
    def forms(self, ids: Iterable[int]) -> dict[str, int]:
        """Return entries by names in tokens that differ from the entry's by separators, or by an s."""
        found = {each.written: each.entry for each in find_names(self.index, map(self.spelling.piece, ids))}
        return {
            written: number
            for written, number in found.items()
            if spelled(written)[0] not in {spelled(name)[0] for name in self[number].names}
        }

    @package_only
    def names_in_front(self, text: str, in_chat: bool = True) -> str:
        """Return names to put before a text, each on a line, so that all its words read the entries.

        Args:
            text: What a user asks.
            in_chat: Whether in a chat, where several entries are read best where the question names them. Default: True.
        """
        numbers = self.named(self.spelling.ids(text))
        return "".join(f"{self[number].names[0]}\n" for number in numbers if not in_chat or len(numbers) == 1)

    @package_only
    def opened(self, ids: Iterable[int]) -> list[tuple[int, int]]:
        """Return where a pass opens an entry: the number of the token, from 0, and of the entry, in order.

        Before the first, a text keeps the logits of the model without packs, bit for bit. A name whose word goes on in a later
        token ("Ann" + "apolis") opens its entry up to there, so the same characters in other tokens may open none.
        """
        names = names_in(self.index, map(self.spelling.piece, ids))
        return [(at, match.entry) for at, token in enumerate(names) for match in token.opens]


def is_new_name(index: NameIndex, name: Name) -> bool:
    """Return whether a name finds texts that no name of an index finds."""
    others = [other for other in index.by_folded.get(name.folded, ()) if may_be_same(name, other)]
    return all(other.written not in (None, name.written) for other in others)


def may_be_same(name: Name, other: Name) -> bool:
    """Return whether a text could have both names at the same place."""
    if name.folded != other.folded or None in (name.written, other.written):
        return name.folded == other.folded
    return name.is_written(str(other.written)) or other.is_written(str(name.written))


def spells(spelling: TokenSpelling, ids: Sequence[int], text: str) -> bool:
    """Return whether tokens spell a text, by the comparison of names."""
    pieces = [spelling.piece(token) for token in ids]
    read = b"".join(piece for piece in pieces if piece is not None).decode("utf-8", "replace")
    return None not in pieces and (read.strip() == text.strip() or spelled(read)[0] == spelled(text)[0])


def _renewed(old: Entry, new: Entry, has_exact: bool) -> Entry:
    """Return an entry with the text, the new names and, if given, the exactness of another."""
    entry = old._replace(text=new.text, exact=new.exact if has_exact else old.exact)
    index = NameIndex(names_of(0, entry))
    return entry._replace(names=(*old.names, *(name for name in new.names if not index.entries_of(name))))


def joined(rows: Iterable[tuple[str, Entry]]) -> tuple[dict[str, Entry], int]:
    """Join entries of rows with the same names, by origin; also return how many rows repeat another one.

    Texts are joined by a line break. A `RequestError` if a text could have a name of two entries, as names are compared.
    """
    texts: dict[tuple[frozenset[str], bool], tuple[str, Entry, dict[str, None]]] = {}
    owners: dict[str, list[tuple[Name, tuple[frozenset[str], bool], str]]] = {}
    repeated = 0
    for where, entry in rows:
        key = frozenset(entry.names), entry.exact
        for name, given in names_of(0, entry).items():
            same = owners.setdefault(name.folded, [])
            for other, owner, first in same:
                if owner != key and may_be_same(name, other):
                    raise RequestError(
                        f"{where} has the name {given!r}, which would also find the entry of {first}; expected names that find one "
                        'entry. Give both rows the same names and the same "exact", which joins them, or, where only case or '
                        'separators differ, "exact": true.'
                    )
            same.append((name, key, where))
        _, _, its_texts = texts.setdefault(key, (where, entry, {}))
        repeated += entry.text in its_texts
        its_texts[entry.text] = None
    return {where: entry._replace(text="\n".join(each)) for where, entry, each in texts.values()}, repeated
