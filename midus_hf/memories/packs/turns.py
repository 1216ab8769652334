"""Turns of a chat: where a user begins to ask and an answer begins, by the marks that the tokenizer's chat template writes."""

import re
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from midus_hf.memories.packs.names import Spelling

# Where a token stands: in a text that is no chat so far, in what a user asks, or in the answer to it.
TEXT, QUESTION, ANSWER = range(3)
# Contents of messages in chats that are rendered to see what stands between them.
_CONTENTS = ("quokka", "wombat", "numbat")
# As `Spelling.written` gives it.
_SPECIAL = rb"\0[^\0]*\0"


class ChatMarks(NamedTuple):
    """What a chat template writes between the contents of messages, in bytes that tokens spell, with white space collapsed.

    Args:
        question: What stands before each content of a user, from where it differs from what stands before answers.
        answer: What stands between a user's content and each answer to it, such as an answer with and without thoughts.
        in_front: The tokens of what stands before each content of a user, behind those that begin every text, such as BOS.
        reach: Number of tokens that a mark has at most.
    """

    question: bytes
    answer: bytes
    in_front: tuple[int, ...]
    reach: int


def chat_marks(spelling: Spelling) -> ChatMarks | None:
    """Return the marks of a tokenizer's chat template; None without a template, or if its roles cannot be told apart."""
    tokenizer = spelling.tokenizer
    if not tokenizer.chat_template:
        return None
    users = [{"role": "user", "content": _CONTENTS[0]}]
    chat = [*users, {"role": "assistant", "content": _CONTENTS[1]}, {"role": "user", "content": _CONTENTS[2]}]
    try:
        first = _rendered(tokenizer, users)
        read = [_between(spelling, first), _between(spelling, _rendered(tokenizer, users, enable_thinking=False))]
        read.append(_between(spelling, _rendered(tokenizer, chat)))
    except Exception as error:  # a template raises what it likes
        warnings.warn(
            f"the chat template cannot be rendered ({error}): packs close at the ends of lines in chats, as in other texts.",
            stacklevel=2,
        )
        return None
    if [len(each) for each in read] != [2, 2, 4]:
        return None
    (before, *answers), (_, without_thoughts), (_, behind_user, behind_answer, last) = read
    answers += [without_thoughts, behind_user, last]
    answer = _common_beginning(answers)
    question = _common_beginning([before[::-1], behind_answer[::-1]])[::-1]
    # From the last special token on by which a question differs from an answer: what ends the message before is left out.
    parts = [question[found.start() :] for found in re.finditer(_SPECIAL, question)]
    question = next((part for part in reversed(parts) if not any(part in other for other in answers)), question)
    question, answer = question.lstrip(b" ").rstrip(), answer.lstrip(b" ").rstrip()
    if not question.strip() or not answer.strip() or answer in question or any(question in each for each in answers):
        return None
    ids = tokenizer(first[: first.index(_CONTENTS[0])], add_special_tokens=False)["input_ids"]
    begins = (at for at in range(len(ids), -1, -1) if question in _spelled(spelling, ids[at:]))
    in_front = (*spelling.ids(""), *ids[next(begins) :])
    # A token spells at least one byte.
    reach = max(len(re.sub(_SPECIAL, b"\0", mark)) for mark in (question, answer)) + 1
    return ChatMarks(question, answer, in_front, reach)


def _common_beginning(texts: Sequence[bytes]) -> bytes:
    """Return what texts begin with, without a part of a special token or of a word."""
    first, last = min(texts), max(texts)
    common = first[
        : next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    ]
    if common.count(b"\0") % 2:
        common = common[: common.rindex(b"\0")]
    is_within = common[-1:].isalnum() and any(text[len(common) : len(common) + 1].isalnum() for text in texts)
    return re.sub(rb"[0-9A-Za-z]+$", b"", common) if is_within else common


def _rendered(tokenizer: Any, chat: Sequence[dict[str, str]], **arguments: Any) -> str:
    """Return a chat as text, up to where an answer begins."""
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **arguments)


def _between(spelling: Spelling, text: str) -> list[bytes]:
    """Return what tokens spell before, between and after the contents of messages."""
    ids = spelling.tokenizer(text, add_special_tokens=False)["input_ids"]
    contents = "|".join(_CONTENTS).encode()
    return re.split(contents, _spelled(spelling, ids))


def _spelled(spelling: Spelling, ids: Sequence[int]) -> bytes:
    """Return what tokens spell, with white space collapsed."""
    return _collapsed(b"".join(map(spelling.written, ids)))


def _collapsed(text: bytes) -> bytes:
    """Return a text in which each run of white space is a line break, if it has one, and otherwise a space."""
    return re.sub(rb"\s+", lambda run: b"\n" if b"\n" in run[0] else b" ", text)


class TurnScan:
    """Whose turn it is, token by token. The result of a token depends on a few tokens before it, and the turn before these.

    Args:
        marks: The marks of the tokenizer's template; None: all texts are read as no chat.
        turn: `TEXT`, `QUESTION` or `ANSWER`. Default: no chat so far.
    """

    def __init__(self, marks: ChatMarks | None, turn: int = TEXT):
        self.marks, self.turn = marks, turn
        self._written: deque[bytes] = deque(maxlen=marks.reach if marks else 0)
        self._ends = () if marks is None else (marks.question[-1:], marks.answer[-1:])

    def read(self, written: bytes) -> bool:
        """Read what a token spells, special tokens included; return whether a mark ends in it."""
        before = b"".join(self._written) if any(end in written for end in self._ends) else None
        self._written.append(written)
        if before is None:
            return False
        assert self.marks is not None, "without marks, none ends"
        seen, text = len(_collapsed(before)), _collapsed(before + written)
        ends = [
            (_end_of(mark, text), turn)
            for mark, turn in ((self.marks.question, QUESTION), (self.marks.answer, ANSWER))
        ]
        end, turn = max(ends)
        if end <= seen:
            return False
        self.turn = turn
        return True


def _end_of(mark: bytes, text: bytes) -> int:
    """Return the place behind the last mark in a text; 0 if there is none, or it is part of a longer word."""
    at = text.rfind(mark)
    is_within = at > 0 and mark[:1].isalnum() and text[at - 1 : at].isalnum()
    return 0 if at < 0 or is_within else at + len(mark)
