"""Phrases that several error messages share."""

import difflib
from collections.abc import Iterable, Sequence


def near_matches(word: str, known: Iterable[str]) -> str:
    """Return a sentence that names up to three known words similar to `word`, or all known words if none is similar."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(repr(match) for match in near)}?"
    return f"Expected one of: {', '.join(known)}."


def install_extra(extra: str) -> str:
    """Return the words that tell how to install an extra: from a clone, since no registry has the package."""
    return f"in the clone of midus_hf, run: pip install -c constraints.txt -e '.[{extra}]'"


def first_few(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names, default 4, and the number of names beyond them, such as `a, b, c, d and 2 more`."""
    beyond = len(names) - most
    return ", ".join(names[:most]) + (f" and {beyond} more" if beyond > 0 else "")


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, or the error's type if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
