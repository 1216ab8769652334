"""Names in text: which end at each token, by the characters that tokens spell."""

import codecs
import functools
import itertools
import unicodedata
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import regex

from midus_hf.config.errors import RequestError
from midus_hf.memories.options import package_only
from midus_hf.sources.characters import is_invisible

# Names with at most this many characters keep their case: "He" is not "he".
_KEEPS_CASE = 3
# Typographic characters that are compared as the plain ones.
_APOSTROPHES, _HYPHENS = "\u2018\u2019\u201a\u201b\u02bc\u2032", "\u2010\u2011\u2012\u2013\u2212"
_PLAIN_CHARACTERS = str.maketrans({**dict.fromkeys(_APOSTROPHES, "'"), **dict.fromkeys(_HYPHENS, "-")})
# Unicode's line-break classes of scripts without spaces.
_WITHOUT_SPACES = r"[\p{lb=ID}\p{lb=CJ}\p{lb=NS}\p{lb=SA}\p{lb=AK}\p{lb=AP}\p{lb=AS}]"
_ENDS_SYLLABLE = r"[\p{lb=JV}\p{lb=JT}]"
# Script whose words have particles attached, as Unicode names its letters.
_WITH_PARTICLES = "HANGUL"
_NAME_SEPARATORS = ("-", "_")
# Names with at least this many letters are also found with an s.
_LETTERS_BEFORE_S = 4
# Tokens after which text before a name is ignored, so that a window of tokens gives the same result as the whole text.
_LOOKBACK = 16


class Character(NamedTuple):
    """A character, folded (a space for white space), and as written (empty after the first folded one)."""

    folded: str
    written: str
    is_word: bool  # a part of a word or a number
    joins: bool  # of a script without spaces
    is_mark: bool = False  # a part of the letter before it: a combining mark, or the end of a Hangul syllable
    script: str = ""  # of a letter of a single script

    @property
    def is_alphanumeric(self) -> bool:
        """Whether it is a letter or digit, or a mark on one."""
        return self.is_word and self.folded != "_"


@functools.cache
def characters_of(character: str) -> tuple[Character, ...]:
    """Return the compatibility decomposition of a character, without what nobody sees."""
    read: list[Character] = []
    # The compatibility decomposition makes single letters of Hangul vowels of a syllable.
    canonical = unicodedata.normalize("NFD", character)
    for plain in unicodedata.normalize("NFKD", character).translate(_PLAIN_CHARACTERS):
        kind = unicodedata.category(plain)
        if plain.isspace():
            read.append(Character(" ", " ", False, False))
        elif not is_invisible(plain):
            is_word = kind[0] in "LNM" or plain == "_"
            joins = regex.match(_WITHOUT_SPACES, plain) is not None
            is_mark = kind[0] == "M" or (plain in canonical and regex.match(_ENDS_SYLLABLE, plain) is not None)
            has_script = kind[0] == "L" and not regex.match(r"\p{sc=Common}", plain)
            script = unicodedata.name(plain, "").split(" ")[0] if has_script else ""
            # Decomposed again, since folding may compose.
            folded = unicodedata.normalize("NFKD", plain.casefold())
            for at, each in enumerate(folded):
                read.append(Character(each, "" if at else plain, is_word, joins, is_mark and not at, script))
    return tuple(read)


def is_within_word(before: Character, character: Character) -> bool:
    """Return whether a character continues a word; signs, another script and one without spaces end it."""
    if not (before.is_word and character.is_word):
        return False
    changes = before.script != character.script and "" not in (before.script, character.script)
    return character.is_mark or not (before.joins or character.joins or changes)


def _read_characters(text: str) -> list[Character]:
    """Return the characters of a text, with single spaces and none at the ends."""
    read: list[Character] = []
    for character in (each for raw in text for each in characters_of(raw)):
        if character.folded != " " or (read and read[-1].folded != " "):
            read.append(character)
    if read and read[-1].folded == " ":
        read.pop()
    return read


def spelled(text: str) -> tuple[str, str]:
    """Return a text folded and as written, with single spaces and none at the ends."""
    read = _read_characters(text)
    return "".join(each.folded for each in read), "".join(each.written for each in read)


def compared(text: str) -> tuple[str, str]:
    """Return `spelled` of a text, with a space for a hyphen or "_" between letters or digits."""
    read = _read_characters(text)
    for at in range(1, len(read) - 1):
        is_separator = read[at].folded in _NAME_SEPARATORS
        if is_separator and read[at - 1].is_alphanumeric and read[at + 1].is_alphanumeric:
            read[at] = Character(" ", " ", False, False)
    return "".join(each.folded for each in read), "".join(each.written for each in read)


class Name(NamedTuple):
    """An entry's name as compared; `written` has its case, if that matters, and its separators if exact."""

    entry: int
    folded: str
    written: str | None
    is_exact: bool = False

    def is_written(self, text: str) -> bool:
        """Return whether a text that is the folded name is the name as written, too."""
        return self.written in (None, text) or (not self.is_exact and self.written == compared(text)[1])


def name_of(entry: int, name: str, exact: bool = False) -> Name:
    """Return an entry's name, in its case if exact, short (up to 3 characters) or with a capital inside."""
    folded, written = compared(name)
    if exact:
        return Name(entry, folded, spelled(name)[1], True)
    has_capital = any(before.isalnum() and each.isupper() for before, each in itertools.pairwise(written))
    return Name(entry, folded, written if len(written) <= _KEEPS_CASE or has_capital else None)


def _with_s(name: Name) -> Name | None:
    """Return the form of a name with an s; None for a short, exact or other name without one."""
    is_long = sum(map(str.isalpha, name.folded)) >= _LETTERS_BEFORE_S and not name.folded.endswith("s")
    if name.is_exact or not is_long or not regex.search(r"\p{sc=Latin}\p{M}*\Z", name.folded):
        return None
    return Name(name.entry, f"{name.folded}s", name.written and f"{name.written}s")


class NameIndex:
    """Sorted names, compared by characters: a node is a range of names with a common prefix. Immutable.

    `not_forms` are words that are no name and an s, such as frequent ones. Default: names are not found with an s.
    """

    def __init__(self, names: Iterable[Name] = (), not_forms: Collection[str] | None = None):
        self.by_folded: dict[str, tuple[Name, ...]] = {}
        # Names with an s. A name of an entry hides those that are the same.
        self._forms: dict[str, tuple[Name, ...]] = {}
        self._not_forms = not_forms
        self._ordered: list[str] = []
        self._add(names)

    def _add(self, names: Iterable[Name]) -> None:
        new: set[str] = set()
        for name in names:
            for forms, each in self._forms_of(name):
                if each.folded not in self.by_folded and each.folded not in self._forms:
                    new.add(each.folded)
                forms[each.folded] = (*forms.get(each.folded, ()), each)
        self._ordered = sorted([*self._ordered, *sorted(new)])  # two sorted parts are merged
        self._steps: dict[tuple[tuple[int, int, int], str], tuple[int, int, int] | None] = {}
        #: Earlier tokens that decide what a token opens: a name has at most one per byte, plus some for spaces and format.
        self.lookback_tokens = 2 * _LOOKBACK + max((len(each.encode()) for each in self._ordered), default=0)

    @package_only
    def exchanged(self, removed: Iterable[Name], added: Iterable[Name]) -> "NameIndex":
        """Return an index without some of the names, and with others."""
        other = NameIndex(not_forms=self._not_forms)
        other.by_folded = self.by_folded.copy()
        other._forms = self._forms.copy()
        for name in removed:
            for forms, each in other._forms_of(name):
                forms[each.folded] = tuple(kept for kept in forms[each.folded] if kept != each)
                if not forms[each.folded]:
                    del forms[each.folded]
        other._ordered = [each for each in self._ordered if each in other.by_folded or each in other._forms]
        other._add(added)
        return other

    @property
    def root(self) -> tuple[int, int, int]:
        """The node of all names."""
        return 0, len(self._ordered), 0

    def _forms_of(self, name: Name) -> Iterator[tuple[dict[str, tuple[Name, ...]], Name]]:
        """Yield a name, and its form with an s, each with the mapping that has it."""
        yield self.by_folded, name
        form = None if self._not_forms is None else _with_s(name)
        if form is not None and form.folded not in (self._not_forms or ()):
            yield self._forms, form

    @package_only
    def entries_of(self, name: str) -> list[int]:
        """Return the numbers of the entries that a name finds."""
        folded, written = compared(name)[0], spelled(name)[1]
        return [*dict.fromkeys(each.entry for each in self._named(folded) if each.is_written(written))]

    def _named(self, folded: str) -> tuple[Name, ...]:
        return self.by_folded.get(folded) or self._forms.get(folded, ())

    def step(self, node: tuple[int, int, int], character: str) -> tuple[int, int, int] | None:
        """Return the node after a character; None if no name continues with it."""
        key = node, character
        if key in self._steps:
            return self._steps[key]
        first, end, depth = node
        found = None
        if first < end:
            prefix = self._ordered[first][:depth] + character
            first = bisect_left(self._ordered, prefix, first, end)
            end = bisect_left(self._ordered, prefix + "\U0010ffff", first, end)
            found = (first, end, depth + 1) if first < end else None
        self._steps[key] = found
        return found

    def at(self, node: tuple[int, int, int]) -> tuple[Name, ...]:
        """Return the names that end at a node."""
        first, _, depth = node
        name = self._ordered[first]
        return self._named(name) if len(name) == depth else ()


class NameMatch(NamedTuple):
    """A name that ends within a token."""

    entry: int
    token: int  # number of the token in which the name begins, from 1
    first: int  # number of its first character
    end: int  # number of the character after its last
    written: str = ""  # the name as the text has it


class TokenNames(NamedTuple):
    """Names that end in a token, in order, and names that ended before it but continue as another word."""

    opens: tuple[NameMatch, ...] = ()
    closes: tuple[NameMatch, ...] = ()


class _PartialMatch(NamedTuple):
    node: tuple[int, int, int]
    token: int
    first: int
    written: str
    is_separated: bool = False


class NameScan:
    """Names in tokens, one by one: the result of a token depends only on it and earlier tokens."""

    def __init__(self, index: NameIndex):
        self.index = index
        self.count = 0
        self._token = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._forget()

    def _forget(self) -> None:
        self._decoder.reset()
        self._begun: list[_PartialMatch] = []
        self._ended: list[tuple[int, NameMatch]] = []
        self._before: tuple[int, Character] | None = None

    def read(self, piece: bytes | None) -> TokenNames:
        """Return the names at the next token from its bytes; None, as of a special token, ends all names."""
        self._token += 1
        if piece is None:
            self._forget()
            return TokenNames()
        if self._before is not None and self._before[0] < self._token - _LOOKBACK:
            self._before = None
        self._begun = [
            each for each in self._begun if each.token > self._token - self.index.lookback_tokens + _LOOKBACK
        ]
        opens: list[NameMatch] = []
        closes: list[NameMatch] = []
        for character in (each for raw in self._decoder.decode(piece) for each in characters_of(raw)):
            self._advance(character, opens, closes)
        return TokenNames(tuple(opens), tuple(closes))

    def _advance(self, character: Character, opens: list[NameMatch], closes: list[NameMatch]) -> None:
        """Read one character: add names that it completes to `opens`, and ones that it breaks to `closes`."""
        before = self._before[1] if self._before is not None else None
        if character.folded == " " and before is not None and before.folded == " ":
            return
        is_within = before is not None and is_within_word(before, character)
        if before is not None and is_within and character.is_mark:
            character = character._replace(script=before.script)
        if self._ended:
            if is_within and (character.is_mark or character.script != _WITH_PARTICLES):
                for token, found in self._ended:
                    if token == self._token:
                        opens.remove(found)
                    else:
                        closes.append(found)
            self._ended = []
        if not is_within and character.folded != " ":
            self._begun.append(_PartialMatch(self.index.root, self._token, self.count, ""))
        self.count += 1
        self._before = self._token, character
        if not self._begun:
            return
        separates = character.folded in _NAME_SEPARATORS and before is not None and before.is_alphanumeric
        begun: list[_PartialMatch] = []
        for each in self._begun:
            if each.is_separated and not character.is_alphanumeric:
                continue
            written = each.written + character.written
            if separates and (node := self.index.step(each.node, " ")) is not None:
                begun.append(_PartialMatch(node, each.token, each.first, written, True))
            if (node := self.index.step(each.node, character.folded)) is None:
                continue
            begun.append(_PartialMatch(node, each.token, each.first, written))
            for name in self.index.at(node):
                if name.is_written(written):
                    found = NameMatch(name.entry, each.token, each.first, self.count, written)
                    opens.append(found)
                    if character.is_word:
                        self._ended.append((self._token, found))
        self._begun = begun


def names_in(index: NameIndex, pieces: Iterable[bytes | None]) -> Iterator[TokenNames]:
    """Yield the names at each token of a text."""
    return map(NameScan(index).read, pieces)


def find_names(index: NameIndex, text: str | Iterable[bytes | None]) -> list[NameMatch]:
    """Return the names in a text, or in bytes of tokens, in order, without those within longer names."""
    found: list[NameMatch] = []
    for token in names_in(index, [text.encode()] if isinstance(text, str) else text):
        for each in token.closes:
            found.remove(each)
        found += token.opens
    spans = {(each.first, each.end) for each in found}
    within = {
        span for span in spans if any(other != span and other[0] <= span[0] and span[1] <= other[1] for other in spans)
    }
    return [each for each in found if (each.first, each.end) not in within]


class TokenSpelling:
    """Bytes that a fast tokenizer's tokens spell: byte-level, byte fallback, metaspaces or word pieces."""

    def __init__(self, tokenizer: Any):
        if not getattr(tokenizer, "is_fast", False):
            raise RequestError(
                f"the tokenizer is a {type(tokenizer).__name__}, which does not tell what its tokens spell; expected one with "
                "tokenizer.json. Convert it with transformers."
            )
        self.tokenizer = tokenizer
        decoder = tokenizer.backend_tokenizer.decoder
        self._is_byte_level = "ByteLevel" in repr(decoder)
        self._is_word_piece = decoder is None or "WordPiece" in repr(decoder)  # without a decoder, tokens are words
        added = tokenizer.added_tokens_decoder
        self._special = {
            number: b"\0%b\0" % token.content.encode() for number, token in added.items() if token.special
        }
        self._added = {number: token.content for number, token in added.items() if not token.special}
        self._size = len(tokenizer)  # which a tokenizer counts anew at each call
        self._pieces: dict[int, bytes | None] = {}
        #: Tokens before a text: those that the tokenizer adds, or a line break.
        self.in_front = self.ids("") or self.ids_of(["\n"], special_tokens=False)[0]

    def piece(self, token: int) -> bytes | None:
        """Return the bytes of a token; None for special tokens and unknown ids."""
        if token not in self._pieces:
            self._pieces[token] = self._read(token)
        return self._pieces[token]

    def written(self, token: int) -> bytes:
        """Return the bytes of a token, those of a special token between zeros; none for padding."""
        return self._special.get(token) or self.piece(token) or b""

    def _read(self, token: int) -> bytes | None:
        """Return the bytes that a token spells, or None for a special or unknown one."""
        if token < 0 or token in self._special:
            return None
        if token in self._added:
            return self._added[token].encode()
        written = self.tokenizer.convert_ids_to_tokens(token) if token < self._size else None
        if written is None or token == self.tokenizer.unk_token_id:
            return None
        if self._is_byte_level:
            table = _byte_of_character()
            return bytes(table[each] for each in written) if table.keys() >= {*written} else written.encode()
        if len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
            return bytes.fromhex(written[3:5])
        if self._is_word_piece:
            return written[2:].encode() if written.startswith("##") else f" {written}".encode()
        return written.replace("▁", " ").encode()

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text to be continued: with the tokenizer's prefix, and without its suffix."""
        return self.ids_of([text])[0]

    def ids_of(self, texts: Sequence[str], special_tokens: bool = True) -> list[list[int]]:
        """Return the tokens of texts, as `ids` does; `special_tokens`: whether with the tokenizer's prefix."""
        rows: list[list[int]] = self.tokenizer([*texts], add_special_tokens=special_tokens, verbose=False)["input_ids"]
        for ids in rows:
            while ids and ids[-1] == self.tokenizer.eos_token_id:
                ids.pop()
        return rows


def whole_words(spelling: TokenSpelling) -> Iterator[str]:
    """Yield words of two letters or more that are one token with a space in front, frequent ones first."""
    for token in range(len(spelling.tokenizer)):
        text = (spelling.piece(token) or b"").decode("utf-8", "replace")
        if text.startswith(" ") and len(text) > 2 and text[1:].isalpha():
            yield text[1:]


@functools.cache
def _byte_of_character() -> Mapping[str, int]:
    """Return the byte of each character of a byte-level vocabulary; printable characters are their own."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def is_text(text: str) -> bool:
    """Return whether a text can be written in UTF-8: it has no half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
