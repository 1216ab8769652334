"""Pages of HTML that need no other file."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jinja2

from midus_hf.analysis.table_of_words import TableOfWords

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
    """Write a page of HTML with sections.

    Args:
        path: File to write.
        title: Title of the page.
        sections: Sections of the page.
    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["base64"] = lambda picture: base64.b64encode(picture).decode()
    written = environment.from_string(_PAGE).render(title=title, sections=sections)
    path.write_text(written, encoding="utf-8")
