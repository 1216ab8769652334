"""Answers to questions about a model, and the files that answers are written to."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midus_hf.analysis.page import ColouredToken, Section, write_page
from midus_hf.analysis.pictures import as_png, save_figures
from midus_hf.analysis.table_of_words import TableOfWords

# Endings of files that an answer can be written to.
FILE_SUFFIXES = (".html", ".png", ".pdf", ".csv", ".json")
# Endings of files that have pictures, for which matplotlib is needed.
DRAWN_SUFFIXES = (".html", ".png", ".pdf")


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

    def section(self, heading: str = "") -> Section:
        """Return the answer as a section of a page, under a heading. Default: no heading."""
        drawn = {title: as_png(draw()) for title, draw in self.pictures.items()}
        return Section(
            heading,
            [self.summary, *self.paragraphs],
            [table for table in self.tables if table.rows],
            drawn,
            self.passages,
        )

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
            path.write_text(self._present(self.csv, "no CSV", path)(), encoding="utf-8")
        elif path.suffix == ".html":
            write_page(path, self.title, self._page())
        else:
            drawers = [draw for answer in (self, *self.sections) for draw in answer.pictures.values()]
            save_figures(path, [draw() for draw in self._present(drawers or None, "no picture", path)])

    def _page(self) -> list[Section]:
        if not self.sections:
            return [self.section()]
        return [Section(paragraphs=[self.summary]), *(answer.section(answer.title) for answer in self.sections)]

    def _present(self, part: Any, lack: str, path: Path) -> Any:
        if part is None:
            raise ValueError(
                f"output is {str(path)!r}, and this answer has {lack}; expected a file ending in .html or .json."
            )
        return part
