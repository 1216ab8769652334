"""Answers to questions about a model: rows of numbers as tables, JSON and CSV, and self-contained pages of HTML."""

import base64
import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from midus_hf.config.errors import RequestError
from midus_hf.files.outputs import atomic_write, write_text
from midus_hf.look.pictures import Panel, as_png, draw_panels

# Endings of files that an answer can be written to.
FILE_SUFFIXES = (".html", ".png", ".pdf", ".csv", ".json")
# Endings of files that have pictures, for which matplotlib is needed.
DRAWN_SUFFIXES = (".html", ".png", ".pdf")

# A row of an answer: values by name. Numbers are not rounded; None is unknown.
Row = Mapping[str, Any]

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 3rem auto; padding: 0 1rem; color: #1c1e21; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; font-size: .85rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #d8dbe0; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
img { max-width: 100%; }
p { white-space: pre-wrap; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) {
body { color: #e4e6ea; background: #121212; }
th, td { border-color: #3a3d42; }
img { filter: invert(.93) hue-rotate(180deg); }
}
</style>
<h1>{{ title }}</h1>
{% for section in sections %}
{% if section.heading %}
<h2>{{ section.heading }}</h2>
{% endif %}
{% for paragraph in section.paragraphs %}
<p>{{ paragraph }}</p>
{% endfor %}
{% for table in section.tables if table.rows %}
<h3>{{ table.title }}</h3>
<table><tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr>
{%- for row in table.rows %}

<tr>{% for cell in row %}<td>{{ cell | replace(" ± ", "\u00a0±\u00a0") }}</td>{% endfor %}</tr>
{%- endfor %}
</table>
{% endfor %}
{% for title, picture in section.pictures.items() %}
<h3>{{ title }}</h3>
<img alt="{{ title }}" src="data:image/png;base64,{{ picture | base64 }}">
{% endfor %}
{% endfor %}
</html>
"""


class TextTable(NamedTuple):
    """A table whose cells are text."""

    title: str
    head: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Return the table in Markdown, with its title above."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in cells)])


def table_of(title: str, rows: Iterable[Row], columns: Mapping[str, str]) -> TextTable:
    """Return a table of rows, whose columns are formats of a row by heading, such as `{"largest share": "{largest:.2%}"}`."""
    return TextTable(title, list(columns), [[form.format(**row) for form in columns.values()] for row in rows])


@dataclass(frozen=True)
class Section:
    """A section of a page: paragraphs, tables (without rows they are left out) and pictures as PNG by title, in this order."""

    heading: str = ""
    paragraphs: Iterable[str] = ()
    tables: Iterable[TextTable] = ()
    pictures: Mapping[str, bytes] = field(default_factory=dict)


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write a page of HTML with a title and sections, whole or not at all."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["base64"] = lambda picture: base64.b64encode(picture).decode()
    text = environment.from_string(_PAGE).render(title=title, sections=sections)
    write_text(path, text)


@dataclass(frozen=True)
class Answer:
    """An answer to one question about a model; on a page, `sections` are answers that it consists of.

    `failure` says why a check failed, which ends the command with status 1.
    """

    title: str
    summary: str
    report: dict[str, Any]
    tables: Sequence[TextTable]
    finding: str = ""
    how_to_read: str = ""
    panels: Mapping[str, Panel] = field(default_factory=dict)
    one_scale: bool = False
    details: Callable[[], Iterable[Row]] | None = None
    sections: "Sequence[Answer]" = ()
    failure: str = ""

    def write(self, path: Path) -> None:
        """Write the answer to a file, as its ending says: a page, a picture, a table of numbers, or JSON."""
        if path.suffix == ".json":
            write_text(path, json.dumps(self.report, indent=2, allow_nan=False) + "\n")
        elif path.suffix == ".html":
            first = [Section(paragraphs=[*self.finding.splitlines(), self.summary])] if self.sections else []
            write_page(path, self.title, [*first, *(answer._section() for answer in self.sections or [self])])
        elif path.suffix == ".csv" and self.details is not None:
            write_text(path, csv_text(self.details()))
        elif path.suffix != ".csv" and self.panels:
            with atomic_write(path) as partial:
                draw_panels(self.panels, self.one_scale).savefig(partial, format=path.suffix[1:], bbox_inches="tight")
        else:
            lack = "CSV" if path.suffix == ".csv" else "picture"
            raise RequestError(
                f"output is {str(path)!r}, and this answer has no {lack}; expected a file ending in .html or .json."
            )

    def _section(self) -> Section:
        picture = {"Picture": as_png(draw_panels(self.panels, self.one_scale))} if self.panels else {}
        paragraphs = filter(None, [self.finding, self.summary, self.how_to_read])
        return Section(self.title, paragraphs, self.tables, picture)


def csv_text(rows: Iterable[Row]) -> str:
    """Return the text of a CSV file: a line of names, then a line per row; all rows have the names of the first."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for number, row in enumerate(rows):
        if number == 0:
            writer.writerow(row)
        writer.writerow(row.values())
    return stream.getvalue()
