"""Tables of text for a terminal, a page or Markdown, and tables of numbers as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class TableOfWords(NamedTuple):
    """A table whose cells are text.

    Args:
        title: Title of the table.
        head: Headings of the columns.
        rows: Cells of each row.
    """

    title: str
    head: list[str]
    rows: list[list[str]]


def with_error(value: str, error: float | None, form: str = "{:.5f}") -> str:
    """Return a number's text with its standard error, which `form` formats; the text alone if the error is None."""
    return value if error is None else f"{value} ± {form.format(error)}"


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the text of a CSV file: the headings, then a line per row."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return stream.getvalue()
