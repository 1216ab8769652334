"""Errors whose messages are shown to users."""

import contextlib
import textwrap
from collections.abc import Iterator

_LONGEST_REASON = 400


class RequestError(ValueError):
    """Error for a request that cannot be carried out. The message gives the value, what was expected, and the remedy."""


class MethodError(RuntimeError):
    """Error for a method that breaks its contract: its author's mistake, not the request's. Nothing was written."""


class VerificationError(RuntimeError):
    """Error for a result that does not do what the method promises."""


def one_line(error: BaseException) -> str:
    """Return another library's error message as one line of at most 400 characters."""
    return textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" ...")


@contextlib.contextmanager
def refusing_requests() -> Iterator[None]:
    """Turn a `ValueError` raised inside the block into a `RequestError` with the same message."""
    try:
        yield
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(str(error)) from None
