"""What a chat template writes around questions and answers, learnt from what it renders; whose turn it is."""

import contextlib
import itertools
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from midus_hf.memories.packs.names import TokenSpelling

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
        # A token spells a byte or more.
        most = 1 + max(len(re.sub(_SPECIAL, b"\0", mark)) for mark in (question, answer))
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
    stripped = filter(None, (mark.lstrip(b" ").rstrip() for mark in marks))
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
    is_same = [byte == other for byte, other in zip(first, last, strict=False)]
    common = first[: [*is_same, False].index(False)]
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
