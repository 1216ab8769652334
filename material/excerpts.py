"""The beginnings of held-out texts, some 5,000 tokens of each kind: short enough to be measured many times on a CPU."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from material.addresses import addresses
from material.articles import articles
from material.cache import cached_folder

_CHARACTERS, _ARTICLES = 1000, 80


def address_excerpts() -> Path:
    """JSON lines, the `text` of the first 1,000 characters of each of the 23 held-out addresses."""
    return _excerpts("addresses-0.2.3-excerpts", _held_out_addresses)


def article_excerpts() -> Path:
    """JSON lines, the `text` of the first 1,000 characters of 80 articles, spread evenly over all."""
    return _excerpts("articles-1.6.5-excerpts", _spread_articles)


def _held_out_addresses() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(addresses().held_out.iterdir())]


def _spread_articles() -> list[str]:
    lines = articles().read_text(encoding="utf-8").splitlines()
    return [json.loads(lines[number * len(lines) // _ARTICLES])["text"] for number in range(_ARTICLES)]


def _excerpts(name: str, texts: Callable[[], Sequence[str]]) -> Path:
    def write(folder: Path) -> None:
        lines = [json.dumps({"text": text[:_CHARACTERS]}) + "\n" for text in texts()]
        (folder / "excerpts.jsonl").write_text("".join(lines), encoding="utf-8")

    return cached_folder(name, write) / "excerpts.jsonl"
