"""Words that refusals share."""

import difflib
from collections.abc import Iterable, Sequence


def near_matches(word: str, known: Iterable[str]) -> str:
    """A sentence that names the known words nearest to `word`, or all of them if none is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(repr(match) for match in near)}?"
    return f"Expected one of: {', '.join(known)}."


def first_few(names: Sequence[str], most: int = 4) -> str:
    """The first of some names, and how many there are beyond them.

    Args:
        names: What to tell.
        most: How many to name. Default: 4.
    """
    beyond = len(names) - most
    return ", ".join(names[:most]) + (f" and {beyond} more" if beyond > 0 else "")
