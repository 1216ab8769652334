"""Domains to learn in turn, or two of them mixed: of each a corpus, text to choose rates on and text to measure, none in another."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from material.addresses import addresses
from material.cache import cached_folder
from material.dictionaries import glosses
from material.elements import FACTS_FILE, elements
from material.factbook import factbook

_CHARACTERS = 1000
_GLOSSES, _HELD_OUT_EVERY = 2400, 12
_SENTENCES_OF_AN_ELEMENT = 4
# Of a mixed corpus: some 165,000 tokens of SmolLM2 of each domain.
_MIXED_CHARACTERS, _MIXED_GLOSSES = 4000, 7000
_MIXED_VALIDATION = {"addresses": 8, "glosses": 70}

Parts = Mapping[str, Sequence[str]]
"""The texts of `corpus`, `validation` and `text`."""


def stages() -> Path:
    """A folder with a folder for each of `addresses`, `factbook`, `glosses` and `elements`.

    Each has `corpus.jsonl`, `validation.jsonl` and `text.jsonl`, JSON lines with a `text`. A corpus has at most 230,000 characters.
    Of addresses and countries, the corpus has the first 1,000 characters, and of those that are held out the first 1,000 are text
    and the next 1,000 validation. Of 2,400 glosses, one of 12 is text and one validation. Of the four sentences on an element, two
    are corpus, one validation and one text.
    """
    return cached_folder("stages-1", _write)


def mixed() -> Path:
    """A folder with `corpus.jsonl`, 330,000 tokens of addresses and glosses in random order, and `validation.jsonl`, of both.

    The corpus has the first 4,000 characters of each address that is not held out, and 7,000 glosses that are neither text nor
    validation of `stages`; validation is the beginning of those of `stages`.
    """
    return cached_folder("mixed-1", _write_mixed)


def _write(folder: Path) -> None:
    for name, parts_of in _PARTS.items():
        (folder / name).mkdir()
        for part, texts in parts_of().items():
            lines = [json.dumps({"text": text}) + "\n" for text in texts]
            (folder / name / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")


def _write_mixed(folder: Path) -> None:
    held_out = {
        part: {name: _texts_of(stages() / name / f"{part}.jsonl") for name in _MIXED_VALIDATION}
        for part in ("validation", "text")
    }
    kept = {text for part in held_out.values() for text in part["glosses"]}
    order = random.Random(0)
    corpus = order.sample([text for text in _texts_of(glosses()) if text not in kept], _MIXED_GLOSSES)
    corpus += [path.read_text(encoding="utf-8")[:_MIXED_CHARACTERS] for path in sorted(addresses().train.iterdir())]
    order.shuffle(corpus)
    validation = [text for name, count in _MIXED_VALIDATION.items() for text in held_out["validation"][name][:count]]
    for part, texts in (("corpus", corpus), ("validation", validation)):
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")


def _of_folders(train: Path, held_out: Path) -> Parts:
    corpus, others = (
        [path.read_text(encoding="utf-8") for path in sorted(part.iterdir())] for part in (train, held_out)
    )
    long = [text for text in others if len(text) >= 2 * _CHARACTERS]
    return {
        "corpus": [text[:_CHARACTERS] for text in corpus],
        "validation": [text[_CHARACTERS : 2 * _CHARACTERS] for text in long],
        "text": [text[:_CHARACTERS] for text in long],
    }


def _of_glosses() -> Parts:
    rows = _texts_of(glosses())
    spread = [rows[number * len(rows) // _GLOSSES] for number in range(_GLOSSES)]
    return {
        "corpus": [text for number, text in enumerate(spread) if number % _HELD_OUT_EVERY > 1],
        "validation": spread[1::_HELD_OUT_EVERY],
        "text": spread[::_HELD_OUT_EVERY],
    }


def _of_elements() -> Parts:
    """Of element n, sentence n modulo 4 is text and the next one validation, so that each wording is in every part."""
    rows = _texts_of(elements() / FACTS_FILE)
    parts = dict[str, list[str]](corpus=[], validation=[], text=[])
    for number, text in enumerate(rows):
        element, sentence = divmod(number, _SENTENCES_OF_AN_ELEMENT)
        part = {0: "text", 1: "validation"}.get((sentence - element) % _SENTENCES_OF_AN_ELEMENT, "corpus")
        parts[part].append(text)
    return parts


def _texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


_PARTS: Mapping[str, Callable[[], Parts]] = {
    "addresses": lambda: _of_folders(addresses().train, addresses().held_out),
    "factbook": lambda: _of_folders(factbook().train, factbook().held_out),
    "glosses": _of_glosses,
    "elements": _of_elements,
}
