"""Wikipedia articles to train on, and others to measure."""

import json
from pathlib import Path

from material.articles import articles

_SHORTEST = 200  # characters; half of the articles are a title and nothing else


def split_articles(folder: Path) -> tuple[Path, Path]:
    """JSON lines to train on, and every tenth article, which is held out; both are written to a folder."""
    long_ones = [text for text in read_texts(articles()) if len(text) >= _SHORTEST]
    held_out = long_ones[::10]
    train = [text for index, text in enumerate(long_ones) if index % 10]
    return _write(folder / "train.jsonl", train), _write(folder / "held-out.jsonl", held_out)


def read_texts(path: Path) -> list[str]:
    """What rows of JSON lines have as `text`."""
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
