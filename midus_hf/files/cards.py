"""Model cards: how they are read and written; Python that loads the model, and results, valid until it changes.

A byte that is no UTF-8 is kept: in the text of a card it is a surrogate. Line ends are kept too.
"""

import io
import re
import sys
from pathlib import Path

from midus_hf.files.checkpoint_files import CARD_FILE
from midus_hf.files.outputs import atomic_write

# The metadata at the top of a card, as the Hub finds it, and the line that begins its results.
_METADATA = re.compile(r"\A\s*---(?:\r\n|\r|\n)[\S\s]*?(?:\r\n|\r|\n)(?=---[ \t]*(?:\r|\n|\Z))")
_RESULTS = re.compile(r"""(["']?)model-index\1[ \t]*:""")
# Heading of a card's section on protected texts, which does not hold once the model is trained again.
PROTECTED_HEADING = "## Protected texts"


def card_text(content: bytes) -> str:
    """Return the text of a card's bytes."""
    return content.decode(errors="surrogateescape")


def card_bytes(text: str) -> bytes:
    """Return the bytes of a card's text."""
    return text.encode(errors="surrogateescape")


def read_card(folder: Path) -> str | None:
    """Return the text of the card in a folder; None without one."""
    path = folder / CARD_FILE
    return card_text(path.read_bytes()) if path.is_file() else None


def write_card(folder: Path, text: str) -> None:
    """Write the card in a folder, whole or not at all."""
    with atomic_write(folder / CARD_FILE) as partial:
        partial.write_bytes(card_bytes(text))


def card_example(model_type: str, auto_class: str, writes: bool, repository: str | None = None) -> list[str]:
    """Return the lines of Python that load a card's model and, if it `writes`, continue a text."""
    path = "PATH" if repository is None else f'"{repository}"'
    arguments = f"({path}, trust_remote_code=True)" if model_type.startswith("midus_") else f"({path})"
    continuing = [
        f"tokenizer = AutoTokenizer.from_pretrained{arguments}",
        'tokens = tokenizer("Once upon a time", return_tensors="pt").input_ids',
        "print(tokenizer.decode(model.generate(tokens, max_new_tokens=20)[0]))",
    ]
    return [
        "```python",
        f"from transformers import {auto_class}" + (", AutoTokenizer" if writes else ""),
        "",
        *(['PATH = "."  # the folder of this file'] if repository is None else []),
        f"model = {auto_class}.from_pretrained{arguments}",
        *(continuing if writes else []),
        "```",
    ]


def without_results(card: str, change: str) -> str:
    """Return a card without the results (`model-index`) that a `change` invalidates; print a note."""
    metadata = _METADATA.match(card)
    kept = ""
    within = found = False
    for line in io.StringIO(metadata[0] if metadata else "", newline=""):
        begins = bool(_RESULTS.match(line))
        within = begins or (within and line[0] in " \t-#\r\n")  # anything else begins the next key
        found = found or begins
        if not within:
            kept += line
    if metadata is None or not found:
        return card
    print(f"results in the card's metadata are left out, since they were measured before {change}", file=sys.stderr)
    return kept + card[metadata.end() :]


def without_section(card: str, heading: str) -> str:
    found = re.search(rf"{re.escape(heading)}\r?\n", card)
    if found is None:
        return card
    _, next_heading, rest = card[found.end() :].partition("\n## ")
    return card[: found.start()].rstrip() + (f"\n\n{next_heading.lstrip()}{rest}" if next_heading else "\n")
