"""The error that refuses a request, and where an error was raised."""

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType

from midus_hf.config.wording import first_line


class RequestError(ValueError):
    """Error for a request that is refused: the message gives the value, what was expected, and the remedy.

    Commands end with status 2 and the message. Any other error, also of a library, ends them with status 1.
    """


@contextlib.contextmanager
def as_request_error(
    prefix: str, *errors: type[Exception], reason: Callable[[Exception], str] = first_line
) -> Iterator[None]:
    """Raise errors of other libraries about what the user gave as a `RequestError`, with `prefix` and a reason."""
    try:
        yield
    except RequestError:
        raise
    except errors as error:
        raise RequestError(f"{prefix}: {reason(error)}") from error


@contextlib.contextmanager
def name_in_request_errors(subject: str) -> Iterator[None]:
    """Put `subject: ` before the message of a `RequestError`."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{subject}: {error}") from error


def traceback_places(error: BaseException, packages: set[str]) -> list[str]:
    """Return where an error was raised, as tracebacks write it: the last place in `packages`, and the innermost if it is another."""
    entries, entry = list[TracebackType](), error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    inside = [each for each in entries if str(each.tb_frame.f_globals.get("__name__")).partition(".")[0] in packages]
    return list(dict.fromkeys(map(_format_place, inside[-1:] + entries[-1:])))


def _format_place(entry: TracebackType) -> str:
    code = entry.tb_frame.f_code
    return f'  File "{code.co_filename}", line {entry.tb_lineno}, in {code.co_qualname}'
