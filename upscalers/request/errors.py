"""Errors meant for people."""

import difflib
import textwrap
from collections.abc import Iterable

_LONGEST_REASON = 400


class RequestError(ValueError):
    """The request cannot be carried out as it was made. The message gives the value, what was expected, the remedy."""


class MethodError(RuntimeError):
    """A method does not keep to its contract: its author's error, whatever was requested. Nothing was written."""


class VerificationError(RuntimeError):
    """The result is not what the method promises."""


def one_line(error: BaseException) -> str:
    """What another library says, in one line of readable length."""
    return textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" ...")


def near_matches(word: str, known: Iterable[str]) -> str:
    """A sentence that names the known words nearest to `word`, or all of them if none is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(repr(match) for match in near)}?"
    return f"Expected one of: {', '.join(known)}."
