"""Tables whose cells are words, for a terminal, a page or Markdown, and tables of numbers as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class TableOfWords(NamedTuple):
    """A table.

    Args:
        title: What it shows.
        head: Words above its columns.
        rows: Its cells.
    """

    title: str
    head: list[str]
    rows: list[list[str]]


def with_error(words: str, error: float | None, form: str = "{:.5f}") -> str:
    """Return words for a number with its standard error, which is written in a form; alone if there is none."""
    return words if error is None else f"{words} ± {form.format(error)}"


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the text of a CSV file: its head, and a line per row."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return stream.getvalue()
