"""Which pack each token of a text reads: what names in the text open, token by token and from pass to pass."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from midus_hf.memories.hosting.state import SPARE_TOKENS, MemoryState
from midus_hf.memories.packs.chat_marks import ANSWER, QUESTION, TEXT, ChatMarks, TurnScan
from midus_hf.memories.packs.names import NameIndex, NameMatch, NameScan, TokenSpelling

# The id of padding.
PADDING_TOKEN = -1
# A name that occurs again within this many positions does not move its pack.
_MAX_STAY = 32
# Places in a text are positions of tokens times this, and the number of a character in the token.
_MAX_CHARACTERS_PER_TOKEN = 1 << 16
# Tokens after which the content of a line is ignored, so that a window of tokens gives the same result as the whole text.
_LINE_LOOKBACK = 16
# A line break at most this many tokens after a special token belongs to a chat template, as in `<|im_start|>assistant`, line break.
_MAX_TOKENS_AFTER_SPECIAL = 3
# Maximum number of tokens of a user's turn that are read with the text of an entry which the turn names.
_MAX_WORDS = 64

# Function of two positions that returns the ids of the tokens from the first to before the second.
TokensAt = Callable[[int, int], Sequence[int]]


class NamedEntries(Protocol):
    """A glossary as tokens ask it: names, what tokens spell, marks of chats, and linked entries."""

    index: NameIndex
    spelling: TokenSpelling
    chat_marks: ChatMarks | None

    @property
    def lookback_tokens(self) -> int: ...

    def linked(self, number: int) -> tuple[int, ...]: ...


class PackKey(NamedTuple):
    """What a pack is computed from."""

    entries: tuple[int, ...]  # whose texts are read as one text, in this order
    in_chat: bool = False  # whether they are read as what a user says in a chat
    words: tuple[int, ...] = ()  # ids that are read after the texts: the words of the user's turn before the name


class Opening(NamedTuple):
    """An opening of an entry by its name."""

    entry: int
    begins: int  # character at which the name begins, as `_place_of` counts them
    position: int  # of the token where the pack is, the last of a name
    ends: int  # character after the name
    stays: bool = False  # whether open until newer names replace it, as in a chat; otherwise to the end of a line
    turn_begins: int = -1  # position of the first token of the user's turn with the name
    words_end: int = -1  # position of the token in which the name begins, where the words of the turn end

    @property
    def last_token(self) -> int:
        """Position of the last token of the name."""
        return self.ends // _MAX_CHARACTERS_PER_TOKEN


class RowState(NamedTuple):
    """What a row has open after a token, the latest first, whose turn it is, and where the turn began."""

    openings: tuple[Opening, ...] = ()
    turn: int = TEXT
    turn_begins: int = 0


class Reading(NamedTuple):
    """The pack that the tokens of a row from `start` to before `stop` read, and the position of the token where it is."""

    start: int
    stop: int
    pack: PackKey
    position: int


class OpeningTracker:
    """What a row has open, token by token: a pure function of the ids so far.

    Args:
        glossary: The entries.
        options: `PacksOptions` of the memory.
        before: The state before the first token. Default: nothing is open.
        earlier: Ids of the tokens before the first one, by their positions. Default: there are none.
    """

    def __init__(
        self,
        glossary: NamedEntries,
        options: Any,
        before: RowState = RowState(),  # noqa: B008
        earlier: TokensAt | None = None,
    ):
        self.glossary, self.options = glossary, options
        self._begin(before, earlier)

    def _begin(self, before: RowState, earlier: TokensAt | None) -> None:
        self.scan, self._turns = NameScan(self.glossary.index), TurnScan(self.glossary.chat_marks, before.turn)
        self._openings, self._turn_begins, self._earlier = [*before.openings], before.turn_begins, earlier
        # Position and id of each token that the scan has read, and the number of characters before it.
        self._tokens: list[tuple[int, int, int]] = []
        # Numbers of the last special token, and of the last one with a letter or digit of its line.
        self._special = self._written = -_LINE_LOOKBACK

    @property
    def state(self) -> RowState:
        """The state after the latest token."""
        return RowState(tuple(self._openings), self._turns.turn, self._turn_begins)

    def read_before(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Read tokens before the first one, at their positions, after which openings and turn are known."""
        turn, spelling = self._turns.turn, self.glossary.spelling
        for token, position in zip(tokens, positions, strict=True):
            self._tokens.append((position, token, self.scan.count))
            self._turns.read(spelling.written(token))
            self.scan.read(spelling.piece(token))
            self._end_line(token)
        self._turns.turn = turn

    def _end_line(self, token: int) -> int | None:
        """Return where the last letter or digit of a line that ends here is; None if none ends."""
        piece, number = self.glossary.spelling.piece(token), len(self._tokens) - 1
        if piece is None:
            self._special = number
            return None
        line, _, rest = piece.decode("utf-8", "replace").partition("\n")
        if any(map(str.isalnum, line)):
            self._written = number
        if b"\n" not in piece:
            return None
        written, self._written = self._written, number if any(map(str.isalnum, rest)) else -_LINE_LOOKBACK
        is_far = written < number - _LINE_LOOKBACK or number - self._special <= _MAX_TOKENS_AFTER_SPECIAL
        return None if is_far or written < 0 else self._tokens[written][0]

    def read(self, token: int, position: int) -> bool:
        """Read the next token, nothing if it is padding (-1); return whether openings or the turn changed."""
        if token < 0:
            return False
        self._tokens.append((position, token, self.scan.count))
        has_turned = self._turns.read(self.glossary.spelling.written(token))
        if has_turned:
            self._turn_begins = position + 1
        if has_turned and self._turns.turn == QUESTION:
            self._openings = [each._replace(stays=True) for each in self._openings]
        written, before = self._end_line(token), len(self._openings)
        if written is not None:
            self._openings = [each for each in self._openings if each.stays or each.last_token >= written]
        has_ended = len(self._openings) < before
        names = self.scan.read(self.glossary.spelling.piece(token))
        for match in names.closes:
            closed = match.entry, self._place_of(match.token, match.first)
            latest = next((each for each in self._openings if (each.entry, each.begins) == closed), None)
            if latest is not None:
                self._openings.remove(latest)
        end = None
        for match in names.opens:
            # An answer reads what is open from where the question named it.
            if self._turns.turn == ANSWER and match.entry in self._read_entries():
                continue
            if match.end != end:  # then names before it cannot continue
                self._openings, end = self._latest_openings(), match.end
            self._openings = [self._opening(match, position), *self._openings][: kept_openings(self.options)]
        return bool(names.closes or names.opens or has_ended or has_turned)

    def _opening(self, match: NameMatch, position: int) -> Opening:
        """Return the opening by a name that ends here; an entry named shortly before is read as it was."""
        begins, ends = self._place_of(match.token, match.first), self._place_of(len(self._tokens), match.end)
        before = next((each for each in self._openings if each.entry == match.entry), None)
        asks = self._turns.turn == QUESTION
        is_near = before is not None and position - before.last_token < _MAX_STAY
        stays = asks or (before is not None and before.stays)
        if before is not None and is_near and (not asks or before.turn_begins == self._turn_begins):
            return before._replace(begins=begins, ends=ends, stays=stays)
        opening = Opening(match.entry, begins, position, ends, stays)
        if not asks:
            return opening
        return opening._replace(turn_begins=self._turn_begins, words_end=begins // _MAX_CHARACTERS_PER_TOKEN)

    def _place_of(self, token: int, character: int) -> int:
        """Return the place of a character: its token's position, then its number within the token."""
        position, _, before = self._tokens[token - 1]
        return position * _MAX_CHARACTERS_PER_TOKEN + character - before

    def _latest_openings(self) -> list[Opening]:
        """Return each entry's latest opening, except those whose name is within a longer one."""
        latest: list[Opening] = []
        for each in self._openings:
            is_within = any(
                (other.begins, other.ends) != (each.begins, each.ends)
                and other.begins <= each.begins
                and each.ends <= other.ends
                for other in self._openings
            )
            if not is_within and all(other.entry != each.entry for other in latest):
                latest.append(each)
        return latest

    def _read_entries(self) -> dict[int, Opening]:
        """Return entries that the latest token reads, by openings: named ones, the latest first, then linked."""
        read = {each.entry: each for each in self._latest_openings()}
        if self.options.links:
            for each in [*read.values()]:
                for linked in self.glossary.linked(each.entry):
                    read.setdefault(linked, each)
        return dict([*read.items()][: self.options.open])

    def pack(self) -> tuple[PackKey, int] | None:
        """Return the pack that the latest token reads, and its position; None if nothing is open."""
        read = self._read_entries()
        if not read:
            return None
        openings = [*dict.fromkeys(read.values())]
        # In the order in which they were named, and a linked one after the one that links to it.
        entries = [entry for opening in reversed(openings) for entry, by in read.items() if by == opening]
        in_chat = self._turns.turn != TEXT
        words = self._words(openings[0]) if in_chat else ()
        return PackKey(tuple(entries), in_chat, words), max(each.position for each in openings)

    def _words(self, opening: Opening) -> tuple[int, ...]:
        """Return the last words of a user's turn before an opening; none without a letter or digit."""
        if opening.turn_begins < 0:
            return ()
        end = opening.words_end
        first = max(opening.turn_begins, end - _MAX_WORDS)
        at, stop = (bisect_left(self._tokens, (position,)) for position in (first, end))
        ids = [token for _, token, _ in self._tokens[at:stop]]
        known = self._tokens[0][0] if self._tokens else end
        if first < known and self._earlier is not None:
            ids = [*self._earlier(first, min(known, end)), *ids]
        said = [(token, spelled) for token in ids if (spelled := self.glossary.spelling.piece(token)) is not None]
        said = [*itertools.dropwhile(lambda each: not each[1].strip(), said)]
        text = b"".join(spelled for _, spelled in said).decode("utf-8", "replace")
        return tuple(token for token, _ in said) if any(map(str.isalnum, text)) else ()


def readings_of(
    row: OpeningTracker, tokens: Sequence[int], positions: Sequence[int], begins: Sequence[bool] | None
) -> tuple[list[Reading], list[RowState]]:
    """Return what a row's tokens (-1: padding) read, and the state after each; `begins`: of documents."""
    readings: list[Reading] = []
    after: list[RowState] = []
    pack, start, state = row.pack(), 0, row.state
    for at, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        is_new = begins is not None and begins[at]
        if is_new:
            row._begin(RowState(), None)
        if row.read(token, position) or is_new:
            now, state = row.pack(), row.state
            if now != pack:
                if pack is not None and at > start:
                    readings.append(Reading(start, at, *pack))
                pack, start = now, at
        after.append(state)
    if pack is not None and len(tokens) > start:
        readings.append(Reading(start, len(tokens), *pack))
    return readings, after


def kept_openings(options: Any) -> int:
    """Return how many openings are kept: those read, and others that return if a name's word goes on."""
    return 2 * options.open + 2


def state_shape(options: Any) -> tuple[int, int]:
    """Return the shape of a state as a tensor, for `PacksOptions`."""
    return 1 + kept_openings(options), len(Opening._fields)


def states_tensor(rows: Sequence[Sequence[RowState]], options: Any) -> torch.Tensor:
    """Return states after tokens, `[B, T, 1 + kept, 7]`, int64: the turn, and openings; entry 0: none."""
    kept, size = state_shape(options)
    filled = [
        [
            [
                (state.turn, state.turn_begins, *[0] * (size - 2)),
                *state.openings,
                *[(0,) * size] * (kept - 1 - len(state.openings)),
            ]
            for state in row
        ]
        for row in rows
    ]
    return torch.tensor(filled, dtype=torch.int64).view(len(rows), -1, kept, size)


def state_of(kept: torch.Tensor) -> RowState:
    """Return the state in a tensor `[1 + kept, 7]`."""
    (turn, turn_begins, *_), *rows = kept.tolist()
    openings = (Opening._make(row) for row in rows if row[0])
    return RowState(tuple(each._replace(stays=bool(each.stays)) for each in openings), turn, turn_begins)


class CachedRows:
    """Trackers of rows for the next pass: none in a copy or a pickle, nor after a change of the state."""

    def __init__(self, rows: Sequence[OpeningTracker] = (), changes: int = -1):
        self._rows, self._changes = rows, changes

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return CachedRows, ()

    def rows(self, glossary: NamedEntries, state: MemoryState) -> Sequence[OpeningTracker]:
        """Return the rows, if they are those of the state and the names that the glossary has now; else none."""
        is_now = self._changes == state.changes and all(row.scan.index is glossary.index for row in self._rows)
        return self._rows if is_now else ()


class Openings:
    """What the sequences of a batch have open, from pass to pass by a state in their cache, if any.

    The state keeps `numbers`, `[B, S]`, ids of all tokens so far from 1 on (0 for padding, and for earlier documents), and their
    `positions`; `open`, states after the last tokens; and `spare`, as `without_last` takes it.
    """

    def __init__(self, glossary: NamedEntries, options: Any, state: MemoryState | None):
        self._glossary, self._options, self._state = glossary, options, state
        self._kept = {} if state is None else {key: tensor.cpu() for key, tensor in state.kept.items()}

    def read(
        self, tokens: torch.Tensor, positions: Sequence[Sequence[int]], begins: torch.Tensor | None
    ) -> list[list[Reading]]:
        """Return what tokens `[B, T]` (-1: padding) read, and keep the state; `begins`: of documents, bool."""
        rows = self._trackers(positions)
        starts = [None] * len(rows) if begins is None else begins.tolist()
        read = [readings_of(*each) for each in zip(rows, tokens.tolist(), positions, starts, strict=True)]
        if self._state is not None:
            places = torch.tensor(positions)
            self._keep(rows, tokens, places, begins, [states[-SPARE_TOKENS - 1 :] for _, states in read])
        return [readings for readings, _ in read]

    def _trackers(self, positions: Sequence[Sequence[int]]) -> Sequence[OpeningTracker]:
        """Return the openings of each row before the first token, of the last pass or the state."""
        if not self._kept or self._state is None:
            return [OpeningTracker(self._glossary, self._options) for _ in positions]
        cached = self._state.shared.pop("rows", CachedRows()).rows(self._glossary, self._state)
        if cached:
            return cached
        rows = []
        kept = self._kept
        for numbers, places, opened in zip(kept["numbers"], kept["positions"], kept["open"], strict=True):
            is_token = numbers > 0  # padding may stand between tokens
            places = places[is_token]
            ids = numbers[is_token] + PADDING_TOKEN

            def earlier(first: int, end: int, ids: torch.Tensor = ids, places: torch.Tensor = places) -> list[int]:
                return ids[(places >= first) & (places < end)].tolist()

            row = OpeningTracker(self._glossary, self._options, state_of(opened[-1]), earlier)
            last = slice(max(len(ids) - self._glossary.lookback_tokens, 0), None)
            row.read_before(ids[last].tolist(), places[last].tolist())
            rows.append(row)
        return rows

    def _keep(
        self,
        rows: Sequence[OpeningTracker],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        begins: torch.Tensor | None,
        states: Sequence[Sequence[RowState]],
    ) -> None:
        """Store the tokens read, and states for taking the latest ones back, in the cache's state."""
        assert self._state is not None
        batch, num_tokens = tokens.shape
        opened = states_tensor(states, self._options)
        before = self._kept or {
            **dict.fromkeys(("numbers", "positions"), tokens.new_zeros(batch, 0)),
            "open": opened.new_zeros(batch, SPARE_TOKENS + 1, *state_shape(self._options)),
            "spare": tokens.new_full((batch,), SPARE_TOKENS),
        }
        numbers = torch.cat([before["numbers"], tokens - PADDING_TOKEN], 1)
        if begins is not None:  # only of the last document
            document = F.pad(begins.long().cumsum(1), (before["numbers"].shape[1], 0))
            numbers = numbers * (document == document[:, -1:])
        self._state.shared["rows"] = CachedRows(rows, self._state.changes)
        self._state.keep(
            {
                "numbers": numbers,
                "positions": torch.cat([before["positions"], positions], 1),
                "open": torch.cat([before["open"], opened], 1)[:, -SPARE_TOKENS - 1 :],
                "spare": (before["spare"] + num_tokens).clamp(max=SPARE_TOKENS),
            }
        )
