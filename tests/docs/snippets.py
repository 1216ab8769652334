"""Blocks of code on the pages, their marks, as CONTRIBUTING.md has them, and which test modules run."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Languages of blocks that a reader runs or hands to a command, and of blocks that only show something.
RUN_LANGUAGES = ("sh", "bash", "console", "python", "yaml")
SHOWN_LANGUAGES = ("text", "json", "toml", "bibtex", "{eval-rst}")
_BLOCK = re.compile(r"((?:^<!-- .*-->\n)*)^```(.*)\n((?:.*\n)*?)^```$", flags=re.MULTILINE)
_MARK = re.compile(r"<!-- not run(?:, `([^`]+)`)?: (.+) -->")
# Blocks that test modules have taken to run.
TAKEN: set["Block"] = set()


@dataclass(frozen=True)
class Mark:
    """Why a block, or the commands of the block that begin with some words, are not run."""

    beginning: str
    reason: str


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `name` is the file that the page says the block is."""

    page: str
    line: int
    language: str
    name: str
    text: str
    marks: tuple[Mark, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_marked(self) -> bool:
        return any(not mark.beginning for mark in self.marks)

    @property
    def commands(self) -> list[str]:
        """Commands of a block without marked ones, continued lines joined; of a console, after `$`."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        beginnings = tuple(mark.beginning for mark in self.marks)
        return [line for line in lines if not (beginnings and line.startswith(beginnings))]


@cache
def pages() -> list[str]:
    paths = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")]
    return [str(path.relative_to(ROOT)) for path in [*paths, *sorted((ROOT / "docs").rglob("*.md"))]]


def blocks_of(page: str) -> list[Block]:
    return blocks_in((ROOT / page).read_text(encoding="utf-8"), page)


def blocks_in(text: str, page: str) -> list[Block]:
    blocks = []
    for match in _BLOCK.finditer(text):
        comments, header, code = match.groups()
        language, _, rest = header.partition(" ")
        marks = tuple(Mark(beginning, reason) for beginning, reason in _MARK.findall(comments))
        line = text.count("\n", 0, match.start(2)) + 1
        blocks.append(Block(page, line, language, rest.removeprefix("file="), code, marks))
    return blocks


def take(page: str, *languages: str, having: str = "", without: tuple[str, ...] = ()) -> list[Block]:
    """Return the blocks of a page that the calling module runs, with a piece and without others."""
    taken = [
        block
        for block in blocks_of(page)
        if block.language in (languages or RUN_LANGUAGES)
        and not block.is_marked
        and having in block.text
        and not any(piece in block.text for piece in without)
    ]
    assert taken, f"{page} has no block to run"
    TAKEN.update(taken)
    return taken
