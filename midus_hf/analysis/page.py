"""One page of HTML that needs no other file."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from midus_hf.analysis.table_of_words import TableOfWords

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 3rem auto; padding: 0 1rem; color: #1c1e21; }}
table {{ border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; font-size: .85rem; }}
th, td {{ padding: .3rem .6rem; border-bottom: 1px solid #d8dbe0; text-align: right; vertical-align: top; }}
th:first-child, td:first-child {{ text-align: left; }}
img {{ max-width: 100%; }}
.passage {{ white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid #d8dbe0; padding-left: .8rem; }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


class ColouredToken(NamedTuple):
    """A token of a passage.

    Args:
        text: As it is read.
        strength: Of its colour, from 0 to 1.
        hint: What is told where it is pointed at; empty for nothing.
    """

    text: str
    strength: float = 0.0
    hint: str = ""


def write_page(
    path: Path,
    title: str,
    paragraphs: Iterable[str],
    tables: Iterable[TableOfWords],
    pictures: Mapping[str, bytes],
    passages: Mapping[str, Sequence[ColouredToken]] | None = None,
) -> None:
    """Write a page.

    Args:
        path: The file.
        title: Of the page.
        paragraphs: Of text.
        tables: Behind them.
        pictures: PNG, by what they show, behind the tables.
        passages: Of a text, by what they show, behind the pictures. Default: none.
    """
    parts = [f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs]
    parts += [_table(table) for table in tables]
    for words, picture in pictures.items():
        encoded = base64.b64encode(picture).decode()
        escaped = html.escape(words)
        parts.append(f'<h2>{escaped}</h2>\n<img alt="{escaped}" src="data:image/png;base64,{encoded}">')
    parts += [_passage(words, tokens) for words, tokens in (passages or {}).items()]
    path.write_text(_PAGE.format(title=html.escape(title), body="\n".join(parts)), encoding="utf-8")


def _passage(title: str, tokens: Iterable[ColouredToken]) -> str:
    spans = [
        html.escape(token.text)
        if not token.hint
        else f'<span style="background: rgba(214, 39, 40, {token.strength:.2f})" title="{html.escape(token.hint)}">'
        f"{html.escape(token.text)}</span>"
        for token in tokens
    ]
    return f'<h2>{html.escape(title)}</h2>\n<p class="passage">{"".join(spans)}</p>'


def _table(table: TableOfWords) -> str:
    lines = [f"<h2>{html.escape(table.title)}</h2>", f"<table><tr>{_cells('th', table.head)}</tr>"]
    lines += [f"<tr>{_cells('td', row)}</tr>" for row in table.rows]
    return "\n".join(lines) + "</table>"


def _cells(tag: str, words: Iterable[str]) -> str:
    return "".join(f"<{tag}>{html.escape(word)}</{tag}>" for word in words)
