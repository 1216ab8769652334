"""Which pack each token of a pass reads, from the names in its text."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from midus_hf.memories.packs.glossary import Glossary
from midus_hf.memories.packs.names import Found, NameScan
from midus_hf.memories.packs.options import PacksOptions
from midus_hf.memories.packs.turns import ANSWER, QUESTION, TEXT, TurnScan

# If an open name occurs again within this many positions, its pack is not moved, so that texts that repeat a name do not
# read the pack at each place.
_STAYS = 32
# Largest number of characters per token: places in a text are numbered by the position of a token and a character in it.
_CHARACTERS = 1 << 16
# Number of tokens after which the content of a line is ignored, so that a window of tokens gives the same result as the whole text.
_LINE_REACH = 16
# A line break at most this many tokens after a special token belongs to a chat template, as in `<|im_start|>assistant`, line break.
_BESIDE_SPECIAL = 3
# Largest number of tokens of a user's turn that are read with the text of an entry which the turn names.
_MAX_WORDS = 64

# Function of two positions that returns the ids of the tokens from the first to before the second.
TokensAt = Callable[[int, int], Sequence[int]]


class PackKey(NamedTuple):
    """What a pack is computed from.

    Args:
        entries: Numbers of the entries whose texts are read as one text, in their order.
        in_chat: Whether the texts are read as what a user says in a chat.
        words: Ids that are read after the texts: the words of the user's turn before the name.
    """

    entries: tuple[int, ...]
    in_chat: bool = False
    words: tuple[int, ...] = ()


class Opening(NamedTuple):
    """An opening of an entry by its name.

    Args:
        entry: Number of the entry.
        begins: Place in the text at which the name begins, its token's position times `_CHARACTERS` and the character's number in it.
        place: Position of the token to which the pack is moved, the last of a name.
        ends: Place in the text after the name.
        stays: Whether the entry is open until newer names replace it, as in a chat; otherwise to the end of a line.
        turn: Position of the first token of the user's turn that the name is in; -1 if it is in none.
        words: Position of the token in which the name begins, up to which the words of the turn are read.
    """

    entry: int
    begins: int
    place: int
    ends: int
    stays: bool = False
    turn: int = -1
    words: int = -1

    @property
    def seen(self) -> int:
        """Position of the last token of the name."""
        return self.ends // _CHARACTERS


class RowState(NamedTuple):
    """What a row has open after a token, the latest opening first, whose turn it is, and the position of the turn's first token."""

    openings: tuple[Opening, ...] = ()
    turn: int = TEXT
    begins: int = 0


class Reading(NamedTuple):
    """The pack that some tokens of a row read: the tokens from `start` to before `stop`, and the position to which it is moved."""

    start: int
    stop: int
    pack: PackKey
    place: int


class OpenNames:
    """Openings of a row, which change token by token.

    Args:
        glossary: The entries.
        options: Options of the memory.
        before: The state before the first token. Default: nothing is open.
        earlier: Ids of the tokens before the first one, by their positions. Default: there are none.
    """

    def __init__(
        self,
        glossary: Glossary,
        options: PacksOptions,
        before: RowState = RowState(),  # noqa: B008
        earlier: TokensAt | None = None,
    ):
        self.glossary, self.options = glossary, options
        self.scan, self.turns = NameScan(glossary.table), TurnScan(glossary.chat_marks, before.turn)
        self.openings = [*before.openings]
        self._turn_begins, self._earlier = before.begins, earlier
        # Position (-1 for padding) and id of each token that the scan has read, and the number of characters before it.
        self._tokens: list[tuple[int, int, int]] = []
        # Numbers of the last special token, and of the last one with a letter or digit of its line.
        self._special = self._written = -_LINE_REACH

    @property
    def num_kept(self) -> int:
        """Openings that are kept: those that tokens read, and others that are restored if a name continues as another word."""
        return kept_openings(self.options)

    def forget(self) -> None:
        """Begin another document."""
        self.openings, self.scan, self._tokens = [], NameScan(self.scan.table), []
        self.turns = TurnScan(self.turns.marks)
        self._turn_begins, self._earlier = 0, None
        self._special = self._written = -_LINE_REACH

    @property
    def state(self) -> RowState:
        """The state after the latest token."""
        return RowState(tuple(self.openings), self.turns.turn, self._turn_begins)

    def read_before(self, tokens: Sequence[int], position: int) -> None:
        """Read tokens before the one at a position, whose openings and turn are known."""
        turn, spelling = self.turns.turn, self.glossary.spelling
        for before, token in zip(range(len(tokens), 0, -1), tokens, strict=True):
            self._tokens.append((position - before if token >= 0 else -1, token, self.scan.count))
            self.turns.read(spelling.written(token))
            self.scan.read(spelling.piece(token))
            self._line_ends(token)
        self.turns.turn = turn

    def _line_ends(self, token: int) -> int | None:
        """Record the latest token; return the position of the last letter or digit of the line that ends in it, None if none ends."""
        piece, number = self.glossary.spelling.piece(token), len(self._tokens) - 1
        if piece is None:
            self._special = number if token >= 0 else self._special
            return None
        line, _, rest = piece.decode("utf-8", "replace").partition("\n")
        if any(map(str.isalnum, line)):
            self._written = number
        if b"\n" not in piece:
            return None
        written, self._written = self._written, number if any(map(str.isalnum, rest)) else -_LINE_REACH
        is_far = written < number - _LINE_REACH or number - self._special <= _BESIDE_SPECIAL
        return None if is_far or written < 0 else self._tokens[written][0]

    def read(self, token: int, position: int) -> bool:
        """Read the next token; return whether openings or the turn changed."""
        self._tokens.append((position if token >= 0 else -1, token, self.scan.count))
        has_turned = self.turns.read(self.glossary.spelling.written(token))
        if has_turned:
            self._turn_begins = position + 1
        if has_turned and self.turns.turn == QUESTION:
            self.openings = [each._replace(stays=True) for each in self.openings]
        written = self._line_ends(token)
        ended = [each for each in self.openings if written is not None and each.seen < written and not each.stays]
        self.openings = [each for each in self.openings if each not in ended]
        does = self.scan.read(self.glossary.spelling.piece(token))
        for found in does.closes:
            name = found.entry, self._place(found.token, found.first)
            latest = next((each for each in self.openings if (each.entry, each.begins) == name), None)
            if latest is not None:
                self.openings.remove(latest)
        end = None
        for found in does.opens:
            # An answer reads what is open from where the question named it.
            if self.turns.turn == ANSWER and found.entry in self._read():
                continue
            if found.end != end:  # then names before it cannot continue
                self.openings, end = self._counting(), found.end
            self.openings = [self._opening(found, position), *self.openings][: self.num_kept]
        return bool(does.closes or does.opens or ended or has_turned)

    def _opening(self, found: Found, position: int) -> Opening:
        """Return the opening by a name that ends in the latest token. An entry that was named shortly before is read as it was."""
        begins, ends = self._place(found.token, found.first), self._place(len(self._tokens), found.end)
        before = next((each for each in self.openings if each.entry == found.entry), None)
        asks = self.turns.turn == QUESTION
        is_near = before is not None and position - before.seen < _STAYS
        if before is not None and is_near and (not asks or before.turn == self._turn_begins):
            return before._replace(begins=begins, ends=ends, stays=asks or before.stays)
        stays = asks or (before is not None and before.stays)
        turn, words = (self._turn_begins, begins // _CHARACTERS) if asks else (-1, -1)
        return Opening(found.entry, begins, position, ends, stays, turn, words)

    def _place(self, token: int, character: int) -> int:
        position, _, before = self._tokens[token - 1]
        return position * _CHARACTERS + character - before

    def _counting(self) -> list[Opening]:
        """Return the latest opening of each entry, except those whose name is within a longer one, which replaces them."""
        counting: list[Opening] = []
        for each in self.openings:
            span = each.begins, each.ends
            is_within = any(
                (other.begins, other.ends) != span and other.begins <= each.begins and each.ends <= other.ends
                for other in self.openings
            )
            if not is_within and all(other.entry != each.entry for other in counting):
                counting.append(each)
        return counting

    def _read(self) -> dict[int, Opening]:
        """Return the entries that the latest token reads, by their openings: named ones, the latest first, then linked ones."""
        read = {each.entry: each for each in self._counting()}
        for each in [*read.values()] if self.options.links else ():
            for linked in self.glossary.linked(each.entry):
                read.setdefault(linked, each)
        return dict([*read.items()][: self.options.open])

    def pack(self) -> tuple[PackKey, int] | None:
        """Return the pack that the latest token reads, and its place; None if nothing is open.

        Texts stand in the order in which they were named, and a linked one after the one that links to it.
        """
        read = self._read()
        if not read:
            return None
        openings = [*dict.fromkeys(read.values())]
        entries = [entry for opening in reversed(openings) for entry, by in read.items() if by == opening]
        in_chat = self.turns.turn != TEXT
        words = self._words(openings[0]) if in_chat else ()
        return PackKey(tuple(entries), in_chat, words), max(each.place for each in openings)

    def _words(self, opening: Opening) -> tuple[int, ...]:
        """Return the last words of a user's turn before the name that opens an entry; none without a letter or digit."""
        if opening.turn < 0:
            return ()
        first, end, piece = max(opening.turn, opening.words - _MAX_WORDS), opening.words, self.glossary.spelling.piece
        at, stop = (bisect_left(self._tokens, (position,)) for position in (first, end))
        ids = [token for _, token, _ in self._tokens[at:stop]]
        known = self._tokens[0][0] if self._tokens else end
        if first < known and self._earlier is not None:
            ids = [*self._earlier(first, min(known, end)), *ids]
        said = [(token, spelled) for token in ids if (spelled := piece(token)) is not None]
        while said and not said[0][1].strip():
            del said[0]
        text = b"".join(spelled for _, spelled in said).decode("utf-8", "replace")
        return tuple(token for token, _ in said) if any(map(str.isalnum, text)) else ()


def kept_openings(options: PacksOptions) -> int:
    """Return how many openings of a row are kept."""
    return 2 * options.open + 2


def readings_of(
    row: OpenNames, tokens: Sequence[int], positions: Sequence[int], begins: Sequence[bool] | None
) -> tuple[list[Reading], list[RowState]]:
    """Return what the tokens of a row read, and the state after each token.

    Args:
        row: Openings before the first token, which change.
        tokens: The ids; -1 for padding.
        positions: Position of each token.
        begins: Whether a document begins at each token. Default: none does.
    """
    readings: list[Reading] = []
    behind: list[RowState] = []
    pack, start, state = row.pack(), 0, row.state
    for at, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        changes = False
        if begins is not None and begins[at]:
            row.forget()
            changes = True
        changes |= row.read(token, position)
        if changes:
            now, state = row.pack(), row.state
            if now != pack:
                if pack is not None and at > start:
                    readings.append(Reading(start, at, *pack))
                pack, start = now, at
        behind.append(state)
    if pack is not None and len(tokens) > start:
        readings.append(Reading(start, len(tokens), *pack))
    return readings, behind


def states_tensor(rows: Sequence[Sequence[RowState]], kept: int) -> torch.Tensor:
    """Return states after tokens, `[B, T, 1 + kept, 7]`, int64: the turn, and openings, of which an entry of 0 means none."""
    none, size = Opening(0, 0, 0, 0), len(Opening._fields)
    filled = [
        [
            [
                (state.turn, state.begins, *[0] * (size - 2)),
                *state.openings,
                *[none] * (kept - len(state.openings)),
            ]
            for state in row
        ]
        for row in rows
    ]
    return torch.tensor(filled, dtype=torch.int64).view(len(rows), -1, *state_shape(kept))


def state_shape(kept: int) -> tuple[int, int]:
    """Return the shape of a state as a tensor."""
    return 1 + kept, len(Opening._fields)


def state_of(kept: torch.Tensor) -> RowState:
    """Return the state in a tensor `[1 + kept, 7]`."""
    (turn, begins, *_), *rows = kept.tolist()
    openings = (Opening._make(row) for row in rows if row[0])
    return RowState(tuple(each._replace(stays=bool(each.stays)) for each in openings), turn, begins)
