"""Reading of JSON files of users, in which every error becomes a `ValueError`."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; raise `ValueError`, with the path, if it cannot be read."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not JSON, or cannot be read ({error}). Repair or download it again.") from None


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text, or of its bytes in UTF-8; raise `ValueError` if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
