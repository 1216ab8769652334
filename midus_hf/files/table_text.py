"""Tables of text: what separates the fields of a CSV or TSV file."""

import csv
import io

# Separators of fields that are looked for, and how messages call them.
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def separator_in(text: str, usual: str) -> str:
    """Return what separates the fields of the first line of a table: `usual`, unless that separates nothing and another does."""
    others = (usual, *SEPARATORS)
    return usual if len(_fields(text, usual)) > 1 else max(others, key=lambda each: len(_fields(text, each)))


def header_of(text: str, usual: str) -> list[str]:
    """Return the names of the columns of a table; none if it has no line. Arguments are as in `separator_in`."""
    return _fields(text, separator_in(text, usual))


def _fields(text: str, separator: str) -> list[str]:
    return next(filter(None, csv.reader(io.StringIO(text, newline=""), delimiter=separator)), [])
