"""Parsing of JSON files of users, in which every error becomes a `ValueError`."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text, or of its bytes in UTF-8; raise `ValueError` if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
