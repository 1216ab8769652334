"""The GNU Collaborative International Dictionary of English 0.48 (GPL): 110,000 headwords, 36 MB of English, from Debian."""

import gzip
import hashlib
import json
import re
import shutil
from pathlib import Path

from material.cache import cached_folder
from material.registry import Package, extract

PACKAGE = Package(
    "apt", "dict-gcide", "0.48.5+nmu2", "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f"
)
_DIGITS = {
    digit: value for value, digit in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
}
# Of 200 parts of the headwords, by their digest.
_VALIDATION_PART = 0
_HELD_OUT_PART = 1


def gcide() -> Path:
    """Folder with `train.jsonl`, `validation.jsonl` and `held_out.jsonl`, in each line the `name` and `text` of a headword's entries.

    Each headword is in one file, by the SHA-256 of its name: 0.5 % in `validation` and 0.5 % in `held_out`.
    """
    return cached_folder("gcide-0.48.5", _split)


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


def _split(folder: Path) -> None:
    dictionary, index = extract(PACKAGE, ["*/gcide.dict.dz", "*/gcide.index"], folder)
    entries = read_entries(gzip.decompress(dictionary.read_bytes()), index.read_text(encoding="utf-8"))
    rows: dict[str, list[str]] = {"train": [], "validation": [], "held_out": []}
    for name, text in entries.items():
        rows[part_of(name)].append(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
    for part, lines in rows.items():
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    shutil.rmtree(folder / "usr")
