"""Errors whose messages are shown to users."""

import textwrap

_LONGEST_REASON = 400


class MethodError(RuntimeError):
    """Error for a method that breaks its contract: its author's mistake, not the request's. Nothing was written."""


class VerificationError(RuntimeError):
    """Error for a result that does not do what the method promises."""


def one_line(error: BaseException) -> str:
    """Return another library's error message as one line of at most 400 characters."""
    return textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" ...")
