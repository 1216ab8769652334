"""Reading of JSON files of users, in which every error becomes a `RequestError`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from midus_hf.config.errors import RequestError


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; raise `RequestError`, with the path, if it cannot be read."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} is not JSON, or cannot be read ({error}). Repair or download it again.") from None


def parse_json(text: str | bytes, unique_keys: bool = False) -> Any:
    """Return the value of JSON text or bytes; raise `ValueError` if it is not JSON or too deep.

    Args:
        text: The text.
        unique_keys: Whether an object that has a key twice is refused too. Default: False, the last value counts.
    """
    try:
        return json.loads(text, object_pairs_hook=_each_once if unique_keys else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) < len(pairs):
        ((key, count),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {key!r} {count} times")
    return read
