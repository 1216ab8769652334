"""The row of a table of refusals, and how each row becomes one test."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Refusal:
    """What is asked for, as its test takes it, and a regular expression of the value, the expectation and the remedy."""

    asked: Any
    said: str

    def __str__(self) -> str:
        """Return what is asked for, in the id of the test."""
        if isinstance(self.asked, dict):
            return ", ".join(f"{key}={value}" for key, value in self.asked.items())
        return " ".join(map(str, self.asked)) if isinstance(self.asked, list) else str(self.asked)


Mutation = Callable[[Path], Any]


@dataclass(frozen=True)
class Spoilt(Refusal):
    """`asked` says in words what `spoil` does to the folder of a model."""

    spoil: Mutation


def each(rows: Iterable[Any]) -> pytest.MarkDecorator:
    """Make a test of each row, its parameter `row`."""
    return pytest.mark.parametrize("row", rows, ids=str)


def remove(name: str) -> Mutation:
    return lambda folder: (folder / name).unlink()


def replace(name: str, text: str) -> Mutation:
    return lambda folder: (folder / name).write_text(text)
