"""24,545 questions and their answers, made by a model: test data of instructlab (Apache-2.0)."""

import json
from dataclasses import dataclass
from pathlib import Path

from material.cache import cached_folder
from material.registry import Package, extract

PACKAGE = Package(
    "pip-source", "instructlab", "0.26.1", "8a74eebfe612807dba01dd0812258f09202117dcdd0274587e1f21536db1a376"
)
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Chats:
    """Two files of JSON lines with `messages`: no chat is in both."""

    train: Path
    held_out: Path


def chats() -> Chats:
    """The chats, every tenth held out, without the system's message: it is the same in all, and names another model."""
    folder = cached_folder("chats-0.26.1", _split)
    return Chats(train=folder / "train.jsonl", held_out=folder / "held_out.jsonl")


def _split(folder: Path) -> None:
    (source,) = extract(PACKAGE, ["*/scripts/test-data/train_all_pruned_SDG.jsonl"], folder)
    parts = Chats(train=folder / "train.jsonl", held_out=folder / "held_out.jsonl")
    with (
        source.open(encoding="utf-8") as lines,
        parts.train.open("w", encoding="utf-8") as train,
        parts.held_out.open("w", encoding="utf-8") as held_out,
    ):
        for number, line in enumerate(lines, start=1):
            messages = [message for message in json.loads(line)["messages"] if message["role"] != "system"]
            print(json.dumps({"messages": messages}), file=train if number % HELD_OUT_EVERY else held_out)
    source.unlink()
    for parent in list(source.parents)[: len(source.relative_to(folder).parts) - 1]:
        parent.rmdir()
