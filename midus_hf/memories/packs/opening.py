"""Which packs each token of a pass reads, from the names in its text."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from midus_hf.memories.packs.glossary import Glossary
from midus_hf.memories.packs.names import NameScan
from midus_hf.memories.packs.options import PacksOptions
from midus_hf.memories.packs.turns import ANSWER, QUESTION, TEXT, TurnScan

# An entry, and whether its text is read as what a user says in a chat.
PackKey = tuple[int, bool]

# If an open name occurs again within this many positions, its pack is not moved, so that texts that repeat a name do not
# read the pack at each place.
_STAYS = 32
# Largest number of characters per token: places in a text are numbered by the position of a token and a character in it.
_CHARACTERS = 1 << 16
# Number of tokens after which the content of a line is ignored, so that a window of tokens gives the same result as the whole text.
_LINE_REACH = 16
# A line break at most this many tokens after a special token belongs to a chat template, as in `<|im_start|>assistant`, line break.
_BESIDE_SPECIAL = 3


class Opening(NamedTuple):
    """An opening of an entry's pack.

    Args:
        entry: Number of the entry.
        begins: Place in the text at which the name begins, its token's position times `_CHARACTERS` and the character's number in it.
        place: Position of the token to which the pack is moved, the last of a name.
        ends: Place in the text after the name.
        is_asked: Whether the name is in what a user asks, so that the pack is open to the end of the answer.
    """

    entry: int
    begins: int
    place: int
    ends: int
    is_asked: bool = False

    @property
    def seen(self) -> int:
        """Position of the last token of the name."""
        return self.ends // _CHARACTERS


class RowState(NamedTuple):
    """What a row has open after a token, the latest opening first, and whose turn it is."""

    openings: tuple[Opening, ...] = ()
    turn: int = TEXT


class Reading(NamedTuple):
    """Packs that some tokens of a row read: the tokens from `start` to before `stop`, and each pack with its place."""

    start: int
    stop: int
    packs: tuple[tuple[PackKey, int], ...]


class OpenNames:
    """Openings of a row, which change token by token.

    Args:
        glossary: The entries.
        options: Options of the memory.
        before: The state before the first token. Default: nothing is open.
    """

    def __init__(self, glossary: Glossary, options: PacksOptions, before: RowState = RowState()):  # noqa: B008
        self.glossary, self.options = glossary, options
        self.scan, self.turns = NameScan(glossary.table), TurnScan(glossary.chat_marks, before.turn)
        self.openings = [*before.openings]
        # Position of each token that the scan has read, and the number of characters before it.
        self._tokens: list[tuple[int, int]] = []
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
        self._special = self._written = -_LINE_REACH

    @property
    def state(self) -> RowState:
        """The state after the latest token."""
        return RowState(tuple(self.openings), self.turns.turn)

    def read_before(self, tokens: Sequence[int], position: int) -> None:
        """Read tokens before the one at a position, whose openings and turn are known."""
        turn, spelling = self.turns.turn, self.glossary.spelling
        for before, token in zip(range(len(tokens), 0, -1), tokens, strict=True):
            self._tokens.append((position - before, self.scan.count))
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
        self._tokens.append((position, self.scan.count))
        has_turned = self._turns(token)
        written = self._line_ends(token)
        ended = [each for each in self.openings if written is not None and each.seen < written and not each.is_asked]
        self.openings = [each for each in self.openings if each not in ended]
        does = self.scan.read(self.glossary.spelling.piece(token))
        for entry in does.closes:
            latest = next((each for each in self.openings if each.entry == entry), None)
            if latest is not None:
                self.openings.remove(latest)
        end = None
        for found in does.opens:
            if found.end != end:  # then names before it cannot continue
                self.openings, end = self._counting(), found.end
            begins, ends = self._place(found.token, found.first), self._place(len(self._tokens), found.end)
            before = next((each for each in self.openings if each.entry == found.entry), None)
            stays = before is not None and position - before.seen < _STAYS
            place = before.place if before is not None and stays else position
            is_asked = self.turns.turn == QUESTION or (before is not None and before.is_asked)
            self.openings = [Opening(found.entry, begins, place, ends, is_asked), *self.openings][: self.num_kept]
        return bool(does.closes or does.opens or ended or has_turned)

    def _turns(self, token: int) -> bool:
        """Tell from the next token whose turn it is. A question closes what the turn before had open, and keeps what is around it."""
        before = self.turns.turn
        if not self.turns.read(self.glossary.spelling.written(token)):
            return False
        if self.turns.turn == QUESTION:
            kept = [] if before == ANSWER else self.openings
            self.openings = [each._replace(is_asked=True) for each in kept]
        return True

    def _place(self, token: int, character: int) -> int:
        position, before = self._tokens[token - 1]
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

    def packs(self) -> tuple[tuple[PackKey, int], ...]:
        """Return each pack that the latest token reads, and its place, the latest named first."""
        read: dict[int, int] = {}
        for each in self._counting():
            read.setdefault(each.entry, each.place)
        for entry, place in [*read.items()] if self.options.links else ():
            for linked in self.glossary.linked(entry):
                read.setdefault(linked, place)
        in_chat = self.turns.turn != TEXT
        return tuple(((entry, in_chat), place) for entry, place in read.items())[: self.options.open]


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
    packs, start, state = row.packs(), 0, row.state
    for at, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        changes = False
        if begins is not None and begins[at]:
            row.forget()
            changes = True
        changes |= row.read(token, position)
        if changes:
            now, state = row.packs(), row.state
            if now != packs:
                if packs and at > start:
                    readings.append(Reading(start, at, packs))
                packs, start = now, at
        behind.append(state)
    if packs and len(tokens) > start:
        readings.append(Reading(start, len(tokens), packs))
    return readings, behind


def states_tensor(rows: Sequence[Sequence[RowState]], kept: int) -> torch.Tensor:
    """Return states after tokens, `[B, T, 1 + kept, 5]`, int64: the turn, and openings, of which an entry of 0 means none."""
    none = Opening(0, 0, 0, 0)
    filled = [
        [[(state.turn, 0, 0, 0, 0), *state.openings, *[none] * (kept - len(state.openings))] for state in row]
        for row in rows
    ]
    return torch.tensor(filled, dtype=torch.int64).view(len(rows), -1, *state_shape(kept))


def state_shape(kept: int) -> tuple[int, int]:
    """Return the shape of a state as a tensor."""
    return 1 + kept, len(Opening._fields)


def state_of(kept: torch.Tensor) -> RowState:
    """Return the state in a tensor `[1 + kept, 5]`."""
    (turn, *_), *rows = kept.tolist()
    openings = [Opening._make(row) for row in rows if row[0]]
    return RowState(tuple(each._replace(is_asked=bool(each.is_asked)) for each in openings), turn)
