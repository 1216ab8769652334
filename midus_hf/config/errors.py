"""The error that refuses a request, phrases that several messages share, and the printing of notes."""

import codecs
import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

_MAX_LINE = 400


class RequestError(ValueError):
    """Error for a request that is refused: the message gives the value, what was expected, and the remedy.

    Commands end with status 2 and the message. Any other error, also of a library, ends them with status 1.
    """


def first_line(error: BaseException) -> str:
    """Return a message's first line, with the next paragraph after a colon, or the error's type."""
    first, _, rest = (str(error).strip() or type(error).__name__).partition("\n")
    if not first.rstrip().endswith(":"):
        return first.rstrip()
    return textwrap.shorten(f"{first} {rest.strip().partition(chr(10) * 2)[0]}", _MAX_LINE, placeholder=" ...")


@contextlib.contextmanager
def as_request_error(
    prefix: str, *errors: type[Exception], reason: Callable[[Exception], str] = first_line
) -> Iterator[None]:
    """Raise other libraries' errors about what the user gave as a `RequestError`: `prefix` and a reason."""
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
    """Return where an error was raised: the last place in `packages`, and the innermost if it is another."""
    entries = list[TracebackType]()
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    inside = [each for each in entries if str(each.tb_frame.f_globals.get("__name__")).partition(".")[0] in packages]
    places = ((each.tb_frame.f_code, each.tb_lineno) for each in inside[-1:] + entries[-1:])
    return list(
        dict.fromkeys(f'  File "{code.co_filename}", line {line}, in {code.co_qualname}' for code, line in places)
    )


def first_few(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names, default 4, and how many more: `a, b, c, d and 2 more`."""
    beyond = len(names) - most
    return ", ".join(names[:most]) + (f" and {beyond} more" if beyond > 0 else "")


def one_of(known: Iterable[str]) -> str:
    """Return a sentence that lists known values: the first 40, and the number of others."""
    return f"Expected one of: {first_few(list(known), 40)}."


def format_count(number: int, noun: str) -> str:
    """Return a number of things, such as `1 entry` or `2,000 entries`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def install_extra(extra: str) -> str:
    """Return how to install an extra: from a clone, since the package is not in a registry."""
    return f"in the clone of midus_hf, run: pip install -c constraints.txt -e '.[{extra}]'"


def save_as_utf8(error: UnicodeDecodeError) -> str:
    """Return a hint on a file that is not text in UTF-8: what it may be, and what converts it."""
    begins = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    name, code = ("UTF-16", "UTF-16") if begins else ("not UTF-8, perhaps Windows-1252", "WINDOWS-1252")
    return f"; it is {name}. Save it as UTF-8, or run: iconv -f {code} -t UTF-8 FILE > NEW"


def no_column(label: str, column: str, columns: Sequence[str]) -> str:
    """Return the message about texts that lack the column of the text; `label` is their name in messages."""
    remedy = "set text_column (--column of eval, look and cluster) to the column that holds the text"
    if any(separator in name for name in columns for separator in ";\t"):
        remedy = "its fields may be separated otherwise: save it with commas, or as JSON lines"
    return f"{label} has no column {column!r}, only {', '.join(columns) or 'nothing'}; {remedy}."


def print_note(line: str, event: str | None = None) -> None:
    """Print a line on standard error, in the first process of a run, or the first to come to an event."""
    if is_main_process() if event is None else is_first_to(event):
        print(line, file=sys.stderr, flush=True)


def is_main_process() -> bool:
    """Return whether this process prints: rank 0 by the launcher's `RANK`, known before torch is set up."""
    return int(os.environ.get("RANK", 0)) == 0


def is_first_to(event: str) -> bool:
    """Return whether no other process of a run has come to an event before, by their shared store.

    Before processes have joined, the first of each machine is the first there.
    """
    store = shared_store()
    if store is None:
        return int(os.environ.get("LOCAL_RANK", 0)) == 0
    try:
        return store.add(f"midus_hf/{event}", 1) == 1
    except RuntimeError:  # the process that had the store has ended
        return False


def shared_store() -> Any:
    """Return the store that the processes of a run share; None before this process has joined others."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()
