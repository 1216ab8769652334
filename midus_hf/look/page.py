"""Answers to questions about a model: tables of text, pages of HTML that need no other file, and the files that answers fill."""

import base64
import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from midus_hf.look.pictures import as_png, save_figures

# Endings of files that an answer can be written to.
FILE_SUFFIXES = (".html", ".png", ".pdf", ".csv", ".json")
# Endings of files that have pictures, for which matplotlib is needed.
DRAWN_SUFFIXES = (".html", ".png", ".pdf")

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 3rem auto; padding: 0 1rem; color: #1c1e21; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; font-size: .85rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #d8dbe0; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
.passage { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid #d8dbe0; padding-left: .8rem; }
</style>
<h1>{{ title }}</h1>
{% for section in sections %}
{% if section.heading %}
<h2>{{ section.heading }}</h2>
{% endif %}
{% for paragraph in section.paragraphs %}
<p>{{ paragraph }}</p>
{% endfor %}
{% for table in section.tables %}
<h3>{{ table.title }}</h3>
<table><tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr>
{%- for row in table.rows %}

<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</table>
{% endfor %}
{% for title, picture in section.pictures.items() %}
<h3>{{ title }}</h3>
<img alt="{{ title }}" src="data:image/png;base64,{{ picture | base64 }}">
{% endfor %}
{% for title, tokens in section.passages.items() %}
<h3>{{ title }}</h3>
<p class="passage">
{%- for token in tokens -%}
{%- if token.hint -%}
<span style="background: rgba(214, 39, 40, {{ '%.2f' % token.strength }})" title="{{ token.hint }}">{{ token.text }}</span>
{%- else -%}
{{ token.text }}
{%- endif -%}
{%- endfor -%}
</p>
{% endfor %}
{% endfor %}
</html>
"""


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


class ColouredToken(NamedTuple):
    """A token of a passage.

    Args:
        text: Text of the token.
        strength: Strength of the colour, from 0 to 1. Default: 0.
        hint: Text that appears when the reader points at the token. A token without a hint has no colour. Default: empty.
    """

    text: str
    strength: float = 0.0
    hint: str = ""


@dataclass(frozen=True)
class Section:
    """A section of a page: paragraphs, tables, pictures and passages, in this order.

    Args:
        heading: Heading of the section. Default: none.
        paragraphs: Paragraphs of plain text. Default: none.
        tables: Tables, each under its title. Default: none.
        pictures: Pictures as PNG, by their titles. Default: none.
        passages: Passages of coloured tokens, by their titles. Default: none.
    """

    heading: str = ""
    paragraphs: Iterable[str] = ()
    tables: Iterable[TableOfWords] = ()
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    passages: Mapping[str, Sequence[ColouredToken]] = field(default_factory=dict)


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write a page of HTML with a title and sections."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["base64"] = lambda picture: base64.b64encode(picture).decode()
    written = environment.from_string(_PAGE).render(title=title, sections=sections)
    path.write_text(written, encoding="utf-8")


@dataclass(frozen=True)
class Answer:
    """An answer to one question about a model.

    Args:
        title: Title of the answer on a page.
        summary: One sentence on what was read or compared.
        report: All numbers, as JSON holds them.
        tables: Tables of the answer. Tables without rows are not shown.
        terminal_tables: Shorter tables for a terminal. Default: `tables`.
        paragraphs: Paragraphs of a page on how the numbers are to be understood. Default: none.
        pictures: Functions that draw a matplotlib figure, by the figure's title. Default: none.
        csv: Function that returns the text of a CSV file. Default: the answer has none.
        passages: Passages of coloured tokens, by their titles. Default: none.
        sections: Answers of which this answer consists; each is a section of the page. Default: none.
    """

    title: str
    summary: str
    report: dict[str, Any]
    tables: Sequence[TableOfWords]
    terminal_tables: Sequence[TableOfWords] | None = None
    paragraphs: Sequence[str] = ()
    pictures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    csv: Callable[[], str] | None = None
    passages: Mapping[str, Sequence[ColouredToken]] = field(default_factory=dict)
    sections: "Sequence[Answer]" = ()

    @property
    def shown(self) -> Sequence[TableOfWords]:
        """Tables for a terminal."""
        return self.tables if self.terminal_tables is None else self.terminal_tables

    def write(self, path: Path) -> None:
        """Write the answer to a file, as the file's ending says: a page, pictures, a table of numbers, or JSON.

        Args:
            path: File to write; the ending is one of `FILE_SUFFIXES`. Pages and pictures need matplotlib.

        Raises:
            ValueError: If the answer has no pictures, or no CSV, and the file is to hold them.
        """
        if path.suffix == ".json":
            path.write_text(json.dumps(self.report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        elif path.suffix == ".csv":
            if self.csv is None:
                raise self._lacks("no CSV", path)
            path.write_text(self.csv(), encoding="utf-8")
        elif path.suffix == ".html":
            joined = [Section(paragraphs=[self.summary]), *(answer._section(answer.title) for answer in self.sections)]
            write_page(path, self.title, joined if self.sections else [self._section()])
        else:
            drawers = [draw for answer in (self, *self.sections) for draw in answer.pictures.values()]
            if not drawers:
                raise self._lacks("no picture", path)
            save_figures(path, [draw() for draw in drawers])

    def _section(self, heading: str = "") -> Section:
        drawn = {title: as_png(draw()) for title, draw in self.pictures.items()}
        tables = [table for table in self.tables if table.rows]
        return Section(heading, [self.summary, *self.paragraphs], tables, drawn, self.passages)

    def _lacks(self, what: str, path: Path) -> ValueError:
        return ValueError(
            f"output is {str(path)!r}, and this answer has {what}; expected a file ending in .html or .json."
        )
