"""Answers to questions about a model: tables, JSON, CSV, pictures, and self-contained pages of HTML."""

import base64
import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from midus_hf.config.errors import RequestError
from midus_hf.files.outputs import atomic_write, write_text

FILE_SUFFIXES = (".html", ".png", ".pdf", ".csv", ".json")  # endings of files that an answer can be written to
DRAWN_SUFFIXES = (".html", ".png", ".pdf")  # endings of files that have pictures, for which matplotlib is needed
Row = Mapping[str, Any]  # a row of an answer: values by name. Numbers are not rounded; None is unknown.
Panel = Callable[[Any], None]  # a function that draws on matplotlib's axes, which already have the panel's title
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
    """Return a table of rows; columns are formats by heading, such as `{"share": "{largest:.2%}"}`."""
    return TextTable(title, list(columns), [[form.format(**row) for form in columns.values()] for row in rows])


@dataclass(frozen=True)
class Section:
    """A section: paragraphs, tables (left out without rows) and PNG pictures by title, in this order."""

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
    """Answer to one question, or page of `sections`; a `failure` ends the command with status 1."""

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
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for number, row in enumerate(rows):
        if number == 0:
            writer.writerow(row)
        writer.writerow(row.values())
    return stream.getvalue()


def new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def as_png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", bbox_inches="tight")
    return stream.getvalue()


def draw_panels(panels: Mapping[str, Panel], one_scale: bool = False) -> Any:
    """Return a figure of titled panels side by side; with `one_scale`, all have the same axes."""
    figure = new_figure(1 + 4 * len(panels), 3.6)
    rows = figure.subplots(1, len(panels), squeeze=False, sharex=one_scale, sharey=one_scale)
    for axes, (title, draw) in zip(rows[0], panels.items(), strict=True):
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        draw(axes)
        if one_scale:
            axes.label_outer()
    return figure


def curves(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, **axis: Any) -> Panel:
    """Return a panel of curves, values of x and y by name; `axis` are properties of the axes."""

    def draw(axes: Any) -> None:
        for name, (xs, ys) in lines.items():
            axes.plot(xs, ys, linewidth=1.5, marker="." if len(xs) < 40 else "", label=name)
        axes.set(xlabel=x, ylabel=y, **axis)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(frameon=False, fontsize=7, ncols=1 + len(lines) // 8)
        axes.grid(alpha=0.25)

    return draw


def bars(lengths: Mapping[str, tuple[float, float]], x: str, total: str) -> Panel:
    """Return a panel of bars, length and standard error by name, the first on top, `total` grey."""

    def draw(axes: Any) -> None:
        values, errors = zip(*lengths.values(), strict=True)
        colors = ["#888888" if name == total else "#c44e52" for name in lengths]
        axes.barh(list(lengths), values, xerr=errors, color=colors, ecolor="#333333")
        axes.axvline(0, color="#333333", linewidth=0.8)
        axes.set_ylim(len(lengths) - 0.4, -0.6)
        axes.set_xlabel(f"{x}\nthin lines: ± one standard error over rows of the text", fontsize=8)

    return draw


def grid(
    rows: Sequence[Sequence[float]],
    x: str,
    y: str,
    *,
    columns: Sequence[str],
    lines: Sequence[str],
    most: float | None = None,
    boundary: float | None = None,
) -> Panel:
    """Return a panel with a coloured field per number, and a line before column `boundary`."""

    def draw(axes: Any) -> None:
        least = None if most is None else 0
        image = axes.imshow(rows, aspect="auto", interpolation="nearest", vmin=least, vmax=most)
        axes.figure.colorbar(image, ax=axes)
        for ticks, names in ((axes.set_xticks, columns), (axes.set_yticks, lines)):
            step = math.ceil(len(names) / 16)
            ticks(range(0, len(names), step), names[::step])
        if boundary is not None:
            axes.axvline(boundary - 0.5, color="#d62728", linestyle="--", linewidth=1)
        axes.set(xlabel=x, ylabel=y)

    return draw
