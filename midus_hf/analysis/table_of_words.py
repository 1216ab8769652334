"""A table whose cells are words, for a terminal, a page or Markdown."""

from typing import NamedTuple


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
