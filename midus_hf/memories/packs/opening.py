"""Which pack each token of a text reads: whose turn it is in a chat, and what names in the text open."""

import contextlib
import itertools
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from midus_hf.memories.packs.names import NameIndex, NameMatch, NameScan, TokenSpelling

# Where a token stands: in a text that is no chat so far, in what a user asks, or in the answer to it.
TEXT, QUESTION, ANSWER = range(3)
_QUESTIONS, _ANSWER, _PROMPT = (b"quokka", b"numbat"), b"wombat", b"bilby"
_SPECIAL = rb"\0[^\0]*\0"
_UNITS = re.compile(rb"\0[^\0]*\0|[0-9A-Za-z\x80-\xff]+|[^\0]", re.DOTALL)
# What a mark has at least that is only a part of what a template writes: a special token, or a word.
_IS_CLEAR = re.compile(rb"\0|[A-Za-z\x80-\xff]{3}")
_READ_AS_TEXT = "packs close at the ends of lines in chats, as in other texts."


class ChatMarks(NamedTuple):
    """What a chat template writes between contents, in bytes that tokens spell, white space collapsed."""

    question: bytes  # before each content of a user, from where it differs from what stands before answers
    answer: bytes  # between a user's content and each answer to it, with and without thoughts
    in_front: tuple[int, ...]  # tokens before a user's content, and those that begin every text, such as BOS
    max_tokens: int  # of a mark


class _Rendering(NamedTuple):
    """A rendered chat: what stands before the content of each user, and after it up to the answer."""

    text: str
    ids: list[int]
    before_users: list[bytes]
    after_users: list[bytes]


def learn_chat_marks(spelling: TokenSpelling) -> tuple[ChatMarks | None, str | None]:
    """Return the marks that a chat template writes; or None, and why chats are read as other texts."""
    if not spelling.tokenizer.chat_template:
        return None, None
    remarks: list[str] = []
    for in_parts in (False, True):  # templates of models that read images may expect a list
        try:
            marks = _learn_marks(spelling, _render_chats(spelling, in_parts))
        except Exception as error:  # a template raises what it likes
            remarks.append(f"the chat template cannot be rendered ({error}): {_READ_AS_TEXT}")
            continue
        if marks is not None:
            return marks, None
        remarks.append(
            f"the chat template does not show where questions and answers begin: {_READ_AS_TEXT} Expected the same words before "
            "each question, and before each answer."
        )
    return None, remarks[0]


def _render_chats(spelling: TokenSpelling, in_parts: bool) -> list[_Rendering]:
    """Render a question, an earlier one with it, one without thoughts, and system prompts if possible."""

    def message(role: str, content: bytes) -> dict[str, Any]:
        text = content.decode()
        return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}

    def render(chat: Sequence[dict[str, Any]], **arguments: Any) -> _Rendering:
        text = spelling.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **arguments)
        return _read_rendering(spelling, text)

    first, last = (message("user", each) for each in _QUESTIONS)
    earlier = [first, message("assistant", _ANSWER), last]
    renderings = [render([first]), render(earlier), render([first], enable_thinking=False)]
    for chat in ([first], earlier):
        with contextlib.suppress(Exception):
            renderings.append(render([message("system", _PROMPT), *chat]))
    return renderings


def _learn_marks(spelling: TokenSpelling, renderings: Sequence[_Rendering]) -> ChatMarks | None:
    if not all(rendering.before_users and rendering.after_users for rendering in renderings):
        return None
    before = [each for rendering in renderings for each in rendering.before_users]
    after = [each for rendering in renderings for each in rendering.after_users]
    for question, answer in itertools.product(_question_marks(before, after), _answer_marks(before, after)):
        if answer in question or any(question in each for each in after):
            continue
        most = (
            max(len(re.sub(_SPECIAL, b"\0", mark)) for mark in (question, answer)) + 1
        )  # a token spells a byte or more
        marks = ChatMarks(question, answer, (), most)
        if all(_holds(marks, spelling, rendering.ids) for rendering in renderings):
            return marks._replace(in_front=(*spelling.ids(""), *_read_before_user(spelling, question, renderings)))
    return None


def _read_rendering(spelling: TokenSpelling, text: str) -> _Rendering:
    """Read a chat; system prompts are a part of what stands before a user's content."""
    ids = _tokenize(spelling, text)
    *gaps, end = re.split(b"(%b)" % b"|".join([*_QUESTIONS, _ANSWER]), _spelled(spelling, ids))
    rendering = _Rendering(text, ids, [], [])
    is_after_user = False
    for gap, content in zip(gaps[::2], gaps[1::2], strict=True):
        if is_after_user:
            rendering.after_users.append(gap)
        is_after_user = content in _QUESTIONS
        if is_after_user:
            rendering.before_users.append(gap)
    return rendering._replace(after_users=[*rendering.after_users, end] if is_after_user else [])


def _question_marks(before: Sequence[bytes], after: Sequence[bytes]) -> Iterator[bytes]:
    """Yield what may mark questions: what stands directly before each, else somewhere before each."""
    common = _common_beginning([each[::-1] for each in before])[::-1]
    # From the last special token by which a question differs from an answer, without the end of the message before.
    parts = [common[found.start() :] for found in re.finditer(_SPECIAL, common)]
    common = next((part for part in reversed(parts) if not any(part in other for other in after)), common)
    yield from _stripped([common, *_common_parts(before)])


def _answer_marks(before: Sequence[bytes], after: Sequence[bytes]) -> Iterator[bytes]:
    """Yield what may mark answers: what stands directly after each question, else somewhere after each."""
    parts = [each for each in _common_parts(after) if not any(each in other for other in before)]
    yield from _stripped([_common_beginning(after), *parts])


def _stripped(marks: Sequence[bytes]) -> list[bytes]:
    """Return marks without white space around them, those of only signs or initials last."""
    stripped = [mark for each in marks if (mark := each.lstrip(b" ").rstrip())]
    return sorted(stripped, key=lambda mark: _IS_CLEAR.search(mark) is None)


def _common_parts(texts: Sequence[bytes]) -> list[bytes]:
    """Return the longest runs of words and special tokens that all texts have, the longest first."""
    units = _UNITS.findall(min(texts, key=len))
    parts: list[bytes] = []
    for first in range(len(units)):
        end = first
        while end < len(units) and all(b"".join(units[first : end + 1]) in text for text in texts):
            end += 1
        part = b"".join(units[first:end])
        if _IS_CLEAR.search(part) and not any(part in other for other in parts):
            parts.append(part)
    return sorted(parts, key=len, reverse=True)


def _holds(marks: ChatMarks, spelling: TokenSpelling, ids: Sequence[int]) -> bool:
    """Return whether marks show the turn of each content of a chat, and of the answer that follows."""
    scan, written, turns = TurnScan(marks), b"", list[int]()
    for piece in map(spelling.written, ids):
        scan.read(piece)
        written += piece
        turns += [scan.turn] * len(piece)
    expected = {**dict.fromkeys(_QUESTIONS, QUESTION), _ANSWER: ANSWER}
    contents = re.finditer(b"|".join(expected), written)
    return scan.turn == ANSWER and all({*turns[each.start() : each.end()]} == {expected[each[0]]} for each in contents)


def _read_before_user(spelling: TokenSpelling, question: bytes, renderings: Sequence[_Rendering]) -> list[int]:
    """Return the tokens from a question's mark to a user's content, without a system prompt in between."""
    written: list[list[int]] = []
    for rendering, content in zip(renderings, _QUESTIONS, strict=False):
        ids = _tokenize(spelling, rendering.text[: rendering.text.index(content.decode())])
        begins = (at for at in range(len(ids), -1, -1) if question in _spelled(spelling, ids[at:]))
        written.append(ids[next(begins) :])
    return min(written, key=len)


def _tokenize(spelling: TokenSpelling, text: str) -> list[int]:
    return spelling.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _common_beginning(texts: Sequence[bytes]) -> bytes:
    """Return what all texts begin with, without a part of a special token or of a word."""
    first, last = min(texts), max(texts)
    common = first[
        : sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    ]
    if common.count(b"\0") % 2:
        common = common[: common.rindex(b"\0")]
    is_within = common[-1:].isalnum() and any(text[len(common) : len(common) + 1].isalnum() for text in texts)
    return re.sub(rb"[0-9A-Za-z]+$", b"", common) if is_within else common


def _spelled(spelling: TokenSpelling, ids: Sequence[int]) -> bytes:
    return _collapsed(b"".join(map(spelling.written, ids)))


def _collapsed(text: bytes) -> bytes:
    """Return a text with a line break, or else a space, for each run of white space."""
    return re.sub(rb"\s+", lambda run: b"\n" if b"\n" in run[0] else b" ", text)


class TurnScan:
    """Whose turn it is, token by token: a function of a few tokens before, and the turn before these."""

    def __init__(self, marks: ChatMarks | None, turn: int = TEXT):
        self.marks, self.turn = marks, turn
        self._written: deque[bytes] = deque(maxlen=marks.max_tokens if marks else 0)
        self._ends = () if marks is None else (marks.question[-1:], marks.answer[-1:])

    def read(self, written: bytes) -> bool:
        """Read what a token spells, special tokens included; return whether a mark ends in it."""
        before = b"".join(self._written) if any(end in written for end in self._ends) else None
        self._written.append(written)
        if before is None:
            return False
        assert self.marks is not None, "without marks, none ends"
        seen, text = len(_collapsed(before)), _collapsed(before + written)
        end, turn = max((_end_of(self.marks.question, text), QUESTION), (_end_of(self.marks.answer, text), ANSWER))
        if end <= seen:
            return False
        self.turn = turn
        return True


def _end_of(mark: bytes, text: bytes) -> int:
    """Return the index after the last mark in a text; 0 without one, or if it is part of a longer word."""
    at = text.rfind(mark)
    is_within = at > 0 and mark[:1].isalnum() and text[at - 1 : at].isalnum()
    return 0 if at < 0 or is_within else at + len(mark)


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

    def linked(self, number: int) -> tuple[int, ...]: ...


class PackKey(NamedTuple):
    """What a pack is computed from."""

    entries: tuple[int, ...]  # whose texts are read as one text, in this order
    in_chat: bool = False  # whether they are read as what a user says in a chat
    words: tuple[int, ...] = ()  # ids that are read after the texts: the words of the user's turn before the name


class Opening(NamedTuple):
    """An opening of an entry by its name."""

    entry: int
    begins: int  # place in the text at which the name begins
    place: int  # position of the token where the pack is, the last of a name
    ends: int  # place in the text after the name
    stays: bool = False  # whether open until newer names replace it, as in a chat; otherwise to the end of a line
    turn: int = -1  # position of the first token of the user's turn with the name
    words: int = -1  # position of the token in which the name begins, where the words of the turn end

    @property
    def last_token(self) -> int:
        """Position of the last token of the name."""
        return self.ends // _MAX_CHARACTERS_PER_TOKEN


class RowState(NamedTuple):
    """What a row has open after a token, the latest first, whose turn it is, and where the turn began."""

    openings: tuple[Opening, ...] = ()
    turn: int = TEXT
    begins: int = 0


class Reading(NamedTuple):
    """The pack that the tokens of a row from `start` to before `stop` read, and the position where it is."""

    start: int
    stop: int
    pack: PackKey
    place: int


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
        self._openings, self._turn_begins, self._earlier = [*before.openings], before.begins, earlier
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
            closed = match.entry, self._place(match.token, match.first)
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
        begins, ends = self._place(match.token, match.first), self._place(len(self._tokens), match.end)
        before = next((each for each in self._openings if each.entry == match.entry), None)
        asks = self._turns.turn == QUESTION
        is_near = before is not None and position - before.last_token < _MAX_STAY
        stays = asks or (before is not None and before.stays)
        if before is not None and is_near and (not asks or before.turn == self._turn_begins):
            return before._replace(begins=begins, ends=ends, stays=stays)
        turn, words = (self._turn_begins, begins // _MAX_CHARACTERS_PER_TOKEN) if asks else (-1, -1)
        return Opening(match.entry, begins, position, ends, stays, turn, words)

    def _place(self, token: int, character: int) -> int:
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
        for each in [*read.values()] if self.options.links else ():
            for linked in self.glossary.linked(each.entry):
                read.setdefault(linked, each)
        return dict([*read.items()][: self.options.open])

    def pack(self) -> tuple[PackKey, int] | None:
        """Return the pack that the latest token reads, and its place; None if nothing is open."""
        read = self._read_entries()
        if not read:
            return None
        openings = [*dict.fromkeys(read.values())]
        # In the order in which they were named, and a linked one after the one that links to it.
        entries = [entry for opening in reversed(openings) for entry, by in read.items() if by == opening]
        in_chat = self._turns.turn != TEXT
        words = self._words(openings[0]) if in_chat else ()
        return PackKey(tuple(entries), in_chat, words), max(each.place for each in openings)

    def _words(self, opening: Opening) -> tuple[int, ...]:
        """Return the last words of a user's turn before an opening; none without a letter or digit."""
        if opening.turn < 0:
            return ()
        first, end = max(opening.turn, opening.words - _MAX_WORDS), opening.words
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
                (state.turn, state.begins, *[0] * (size - 2)),
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
    (turn, begins, *_), *rows = kept.tolist()
    openings = (Opening._make(row) for row in rows if row[0])
    return RowState(tuple(each._replace(stays=bool(each.stays)) for each in openings), turn, begins)
