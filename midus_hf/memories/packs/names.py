"""Names in text: which entries' names end at each token, found in the characters that tokens spell."""

import codecs
import functools
import itertools
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from midus_hf.config.errors import RequestError

# Names with at most this many characters keep their case: "He" is not "he".
_KEEPS_CASE = 3
# Typographic characters that are compared as the plain ones.
_APOSTROPHES, _HYPHENS = "\u2018\u2019\u201a\u201b\u02bc\u2032", "\u2010\u2011\u2012\u2013\u2212"
_PLAIN_CHARACTERS = str.maketrans({**dict.fromkeys(_APOSTROPHES, "'"), **dict.fromkeys(_HYPHENS, "-")})
# First words of Unicode character names, for scripts that are written without spaces between words.
_WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "THAI", "LAO", "KHMER", "MYANMAR", "BOPOMOFO")
# Number of tokens after which text before a name is ignored, so that a window of tokens gives the same result as the whole text.
_REACH = 16


class Character(NamedTuple):
    """A character for the comparison of names: folded, and as it was written.

    Args:
        folded: The character with its case folded; a space for white space.
        written: The character with its case; empty after the first of several folded ones.
        is_word: Whether it is part of a word or a number.
        joins: Whether words of its script are written without spaces.
        is_mark: Whether it is a combining mark of the letter before it, in any script.
    """

    folded: str
    written: str
    is_word: bool
    joins: bool
    is_mark: bool = False


@functools.cache
def characters_of(character: str) -> tuple[Character, ...]:
    """Return a character for the comparison of names: its compatibility decomposition, without format characters."""
    read: list[Character] = []
    for plain in unicodedata.normalize("NFKD", character).translate(_PLAIN_CHARACTERS):
        kind = unicodedata.category(plain)
        if plain.isspace():
            read.append(Character(" ", " ", False, False))
        elif kind != "Cf":
            is_word = kind[0] in "LNM" or plain == "_"
            joins = unicodedata.name(plain, "").split(" ")[0] in _WITHOUT_SPACES
            # Decomposed again, since folding may compose.
            folded = unicodedata.normalize("NFKD", plain.casefold())
            for at, each in enumerate(folded):
                read.append(Character(each, "" if at else plain, is_word, joins, kind[0] == "M" and not at))
    return tuple(read)


def spelled(text: str) -> tuple[str, str]:
    """Return a text for the comparison of names, folded and as written: runs of white space are one space, and none at the ends."""
    read: list[Character] = []
    for character in (each for raw in text for each in characters_of(raw)):
        if character.folded != " " or (read and read[-1].folded != " "):
            read.append(character)
    if read and read[-1].folded == " ":
        read.pop()
    return "".join(each.folded for each in read), "".join(each.written for each in read)


class Name(NamedTuple):
    """A name of an entry.

    Args:
        entry: Number of the entry.
        folded: The name as it is compared.
        written: The name with its case, if case matters; else None.
    """

    entry: int
    folded: str
    written: str | None

    def may_be(self, other: "Name") -> bool:
        """Return whether a text could have both names at the same place."""
        return self.folded == other.folded and (None in (self.written, other.written) or self.written == other.written)


def name_of(entry: int, name: str, exact: bool = False) -> Name:
    """Return a name; `exact`, a name of at most three characters, and one with a capital within a word keep their case."""
    folded, written = spelled(name)
    within = any(before.isalnum() and each.isupper() for before, each in itertools.pairwise(written))
    keeps = exact or len(written) <= _KEEPS_CASE or within
    return Name(entry, folded, written if keeps else None)


def _reach_of(folded: str) -> int:
    return len(folded.encode()) + 2 * _REACH


class NameTable:
    """Sorted names, with which a text is compared character by character: a node is a range of names with a common prefix.

    A table is immutable, so that one that is being read can be replaced by another.

    Args:
        names: The names.
    """

    def __init__(self, names: Iterable[Name] = ()):
        self.by_folded: dict[str, tuple[Name, ...]] = {}
        for name in names:
            self.by_folded[name.folded] = (*self.by_folded.get(name.folded, ()), name)
        self._ordered = sorted(self.by_folded)
        self._steps: dict[tuple[tuple[int, int, int], str], tuple[int, int, int] | None] = {}
        # Tokens that are read again after a pass: a name has at most one for each of its bytes, plus some for spaces and format.
        self.reach = max(map(_reach_of, self._ordered), default=2 * _REACH)

    @property
    def root(self) -> tuple[int, int, int]:
        """The node of all names."""
        return 0, len(self._ordered), 0

    def changed(self, added: Sequence[Name] = (), removed: Iterable[Name] = ()) -> "NameTable":
        """Return a table with some names added and some removed."""
        table = NameTable()
        table.by_folded, table._ordered = dict(self.by_folded), list(self._ordered)
        for name in removed:
            left = tuple(other for other in table.by_folded.pop(name.folded) if other != name)
            if left:
                table.by_folded[name.folded] = left
            else:
                del table._ordered[bisect_left(table._ordered, name.folded)]
        for name in added:
            if name.folded not in table.by_folded:
                table._ordered.append(name.folded)
            table.by_folded[name.folded] = (*table.by_folded.get(name.folded, ()), name)
        table._ordered.sort()
        table.reach = max(self.reach, *(_reach_of(name.folded) for name in added), 0)
        return table

    def found(self, name: str) -> list[int]:
        """Return the numbers of the entries that a name finds."""
        folded, written = spelled(name)
        found = (each.entry for each in self.by_folded.get(folded, ()) if each.written in (None, written))
        return [*dict.fromkeys(found)]

    def step(self, node: tuple[int, int, int], character: str) -> tuple[int, int, int] | None:
        """Return the node that a character leads to; None if no name continues with it."""
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
        return self.by_folded[name] if len(name) == depth else ()


class Found(NamedTuple):
    """A name that ends within a token.

    Args:
        entry: Number of the entry.
        token: Number of the token in which the name begins.
        first: Number of the name's first character.
        end: Number of the character after its last.
    """

    entry: int
    token: int
    first: int
    end: int


class TokenNames(NamedTuple):
    """Result of a token: names that end in it, in order, and entries whose name ended before it but continues as another word."""

    opens: tuple[Found, ...] = ()
    closes: tuple[int, ...] = ()


_NO_NAMES = TokenNames()


def longest_of(names: Sequence[Found]) -> list[Found]:
    """Return the names that are not within a longer one."""
    spans = {(each.first, each.end) for each in names}
    within = {
        span for span in spans if any(other != span and other[0] <= span[0] and span[1] <= other[1] for other in spans)
    }
    return [each for each in names if (each.first, each.end) not in within]


class _Begun(NamedTuple):
    """A name that has begun: its node, token and character, and the text since."""

    node: tuple[int, int, int]
    token: int
    first: int
    written: str


class NameScan:
    """Names in the tokens of one text, found token by token: the result of a token depends only on it and earlier tokens.

    Args:
        table: The names.
    """

    def __init__(self, table: NameTable):
        self.table = table
        #: Characters that were read.
        self.count = 0
        self._token = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._forget()

    def _forget(self) -> None:
        self._decoder.reset()
        self._begun: list[_Begun] = []
        self._ended: list[tuple[int, Found]] = []
        self._before: tuple[int, Character] | None = None

    def read(self, piece: bytes | None) -> TokenNames:
        """Return the result of the next token; `piece` are its bytes, None for one that no name reaches into, such as padding."""
        self._token += 1
        if piece is None:
            self._forget()
            return _NO_NAMES
        if self._before is not None and self._before[0] < self._token - _REACH:
            self._before = None
        self._begun = [each for each in self._begun if each.token > self._token - self.table.reach + _REACH]
        opens: list[Found] = []
        closes: list[int] = []
        for character in (each for raw in self._decoder.decode(piece) for each in characters_of(raw)):
            self._advance(character, opens, closes)
        if not (opens or closes):
            return _NO_NAMES
        return TokenNames(tuple(opens), tuple(closes))

    def _advance(self, character: Character, opens: list[Found], closes: list[int]) -> None:
        before = self._before[1] if self._before is not None else None
        if character.folded == " " and before is not None and before.folded == " ":
            return
        are_words = before is not None and character.is_word and before.is_word
        goes_on = before is not None and are_words and (character.is_mark or not (character.joins or before.joins))
        if self._ended:
            for token, found in self._ended if goes_on else ():
                if token == self._token:
                    opens.remove(found)
                else:
                    closes.append(found.entry)
            self._ended = []
        if not goes_on and character.folded != " ":
            self._begun.append(_Begun(self.table.root, self._token, self.count, ""))
        self.count += 1
        self._before = self._token, character
        begun: list[_Begun] = []
        for each in self._begun:
            node = self.table.step(each.node, character.folded)
            if node is None:
                continue
            now = _Begun(node, each.token, each.first, each.written + character.written)
            begun.append(now)
            for name in self.table.at(node):
                if name.written is None or name.written == now.written:
                    found = Found(name.entry, now.token, now.first, self.count)
                    opens.append(found)
                    if character.is_word:
                        self._ended.append((self._token, found))
        self._begun = begun


def names_in(table: NameTable, pieces: Iterable[bytes | None]) -> Iterator[TokenNames]:
    """Yield the result of each token of a text; `Found.token` counts tokens from 1."""
    return map(NameScan(table).read, pieces)


class Spelling:
    """The characters that the tokens of a tokenizer spell.

    Args:
        tokenizer: A fast tokenizer, whose decoder is byte-level, has byte fallback or metaspaces, or joins words or their pieces.

    Raises:
        RequestError: If the tokenizer does not tell what its tokens spell.
    """

    def __init__(self, tokenizer: Any):
        if not getattr(tokenizer, "is_fast", False):
            raise RequestError(
                f"the tokenizer is a {type(tokenizer).__name__}, which does not tell what its tokens spell; expected one with "
                "tokenizer.json. Convert it with transformers."
            )
        self.tokenizer = tokenizer
        decoder = tokenizer.backend_tokenizer.decoder
        # Without a decoder, tokens are words.
        self._is_byte_level, self._is_word_piece = "ByteLevel" in repr(decoder), "WordPiece" in repr(decoder)
        self._is_word_piece |= decoder is None
        added = tokenizer.added_tokens_decoder
        self._special = {
            number: b"\0%b\0" % token.content.encode() for number, token in added.items() if token.special
        }
        self._added = {number: token.content for number, token in added.items() if not token.special}
        # Special tokens by their text without the case of letters.
        self._special_texts = {token.content.casefold(): token.content for token in added.values() if token.special}
        self._size = len(tokenizer)  # which a tokenizer counts anew at each call
        self._pieces: dict[int, bytes | None] = {}
        #: Tokens before a text: those that the tokenizer adds, or a line break.
        self.in_front = self.ids("") or self.ids_of(["\n"], special_tokens=False)[0]

    def piece(self, token: int) -> bytes | None:
        """Return the bytes that a token spells; None for special tokens and ids that the tokenizer does not have."""
        if token not in self._pieces:
            self._pieces[token] = self._read(token)
        return self._pieces[token]

    def written(self, token: int) -> bytes:
        """Return the bytes that a token spells, those of a special token between zeros; none for padding."""
        return self._special.get(token) or self.piece(token) or b""

    def _read(self, token: int) -> bytes | None:
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
        """Return the tokens of a text that is to be continued: with the tokenizer's prefix, and without its suffix."""
        return self.ids_of([text])[0]

    def ids_of(self, texts: Sequence[str], special_tokens: bool = True) -> list[list[int]]:
        """Return the tokens of texts, as `ids` does; `special_tokens`: whether with the tokenizer's prefix."""
        rows: list[list[int]] = self.tokenizer([*texts], add_special_tokens=special_tokens, verbose=False)["input_ids"]
        for ids in rows:
            while ids and ids[-1] == self.tokenizer.eos_token_id:
                ids.pop()
        return rows

    def special_in(self, text: str) -> str | None:
        """Return a special token that the tokenizer may find in a text between spaces, in any case of its letters; None without."""
        within = f" {' '.join(text.split())} ".casefold()
        return next((token for folded, token in self._special_texts.items() if folded in within), None)

    def spells(self, ids: Sequence[int], text: str) -> bool:
        """Return whether tokens spell a text, by the comparison of names."""
        pieces = [self.piece(token) for token in ids]
        read = b"".join(piece for piece in pieces if piece is not None).decode("utf-8", "replace")
        return None not in pieces and (read.strip() == text.strip() or spelled(read)[0] == spelled(text)[0])


def whole_words(spelling: Spelling) -> Iterator[str]:
    """Yield the words of two letters or more that are one token with the space in front, by their ids: frequent ones come first."""
    for token in range(len(spelling.tokenizer)):
        text = (spelling.piece(token) or b"").decode("utf-8", "replace")
        if text.startswith(" ") and len(text) > 2 and text[1:].isalpha():
            yield text[1:]


@functools.cache
def _byte_of_character() -> Mapping[str, int]:
    """Return the byte of each character of a byte-level vocabulary: printable characters are their own byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
