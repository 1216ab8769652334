"""Errors meant for people."""

import contextlib
import textwrap
from collections.abc import Iterator

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


@contextlib.contextmanager
def refusing_requests() -> Iterator[None]:
    """What is refused as a value within is refused as a request: its message becomes that of a `RequestError`."""
    try:
        yield
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(str(error)) from None
