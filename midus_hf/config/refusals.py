"""Whose error it is: a refusal, which is our sentence about a request, or the failure of a library or of our own code."""

import contextlib
import dis
from collections.abc import Iterator
from types import FrameType, TracebackType

from midus_hf.config.plugins import plugin_packages


def is_refusal(error: BaseException) -> bool:
    """Return whether an error is a `ValueError` that a `raise` statement of this package, of `upscalers` or of a plugin raised.

    Python and libraries raise `ValueError` too, as `int("x")` does, about values that need not come from the request.
    """
    if not isinstance(error, ValueError) or error.__traceback__ is None:
        return False
    innermost = _entries(error)[-1]
    return _is_ours(innermost.tb_frame) and any(
        each.offset == innermost.tb_lasti and each.opname == "RAISE_VARARGS"
        for each in dis.get_instructions(innermost.tb_frame.f_code)
    )


@contextlib.contextmanager
def refusals_about(subject: str) -> Iterator[None]:
    """Put `subject: ` before the message of a refusal that the context raises; other errors are raised unchanged."""
    try:
        yield
    except ValueError as error:
        if not is_refusal(error):
            raise
        raise ValueError(f"{subject}: {error}") from error


def raised_at(error: BaseException) -> list[str]:
    """Return where an error was raised, as tracebacks write it: the last place in our code, and the innermost if it is another."""
    entries = _entries(error)
    ours = [entry for entry in entries if _is_ours(entry.tb_frame)]
    return list(dict.fromkeys(map(_place, ours[-1:] + entries[-1:])))


def _entries(error: BaseException) -> list[TracebackType]:
    entries, entry = [], error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries


def _place(entry: TracebackType) -> str:
    code = entry.tb_frame.f_code
    return f'  File "{code.co_filename}", line {entry.tb_lineno}, in {code.co_qualname}'


def _is_ours(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("midus_hf", "upscalers") or package in plugin_packages()
